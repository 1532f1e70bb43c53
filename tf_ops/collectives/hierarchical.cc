#include "collectives/hierarchical.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/add_sources.h"
#include "collectives/exchange.h"
#include "collectives/host_layout.h"
#include "collectives/host_sums.h"
#include "collectives/ring_plan.h"
#include "collectives/select.h"
#include "collectives/windows.h"
#include "transport/kept.h"

namespace keras_ring {
namespace {

using Span = HostLayout::Span;

// The host's side: this rank packs what others sum up, and copies out what they have got. As the
// segments of a ring: the sums of this rank's lane.
class Host : public RingSegments {
 public:
  Host(const LocalWire& wire, const HostLayout& layout, int num_lanes, const Bucket& bucket)
      : arena_(*wire.arena),
        stages_(wire.stages),
        bucket_(bucket),
        layout_(layout),
        num_lanes_(num_lanes),
        copies_(bucket),
        accumulator_bytes_(static_cast<std::int64_t>(AccumulatorBytes(bucket.dtype))),
        first_window_(arena_.first_window) {}

  bool has_lane() const { return own() < num_lanes_; }
  bool is_done() const { return copied_ == num_slabs(); }
  std::int64_t end_window() const { return first_window_ + num_slabs(); }

  // Each does one window if that is possible without waiting; whether it did.
  bool Pack() {
    // The slot is free when nobody reads its former window any more.
    if (packed_ == num_slabs() ||
        !arena_.HaveAll(Arena::kCopied, first_window_ + packed_ + 1 - arena_.num_slots())) {
      return false;
    }
    const StageTimer timer(stages_, Stage::kPack);
    for (int chunk = 0; chunk < layout_.num_chunks() && arena_.local_size() > 1; ++chunk) {
      if (layout_.LaneOf(chunk) == own()) continue;
      copies_.Pack(layout_.Spans(packed_, chunk), SlotOf(own(), packed_));
    }
    arena_.SetProgress(Arena::kPacked, first_window_ + ++packed_);
    return true;
  }

  bool CopyOut() {
    if (copied_ == num_slabs()) return false;
    for (int lane = 0; lane < num_lanes_; ++lane) {
      if (lane == own() ? kept_ <= copied_
                        : arena_.Progress(lane, Arena::kReduced) < first_window_ + copied_ + 1) {
        return false;
      }
    }
    const StageTimer timer(stages_, Stage::kUnpack);
    for (int chunk = 0; chunk < layout_.num_chunks(); ++chunk) {
      if (layout_.LaneOf(chunk) == own()) continue;
      copies_.CopyOut(layout_.Spans(copied_, chunk), SlotOf(layout_.LaneOf(chunk), copied_));
    }
    // Nor does this rank read the others' inputs for its own lane any more.
    arena_.SetProgress(Arena::kCopied, first_window_ + ++copied_);
    return true;
  }

  DType dtype() const override { return bucket_.dtype; }
  Format own_format() const override { return Format::kAccumulator; }
  std::int64_t num_slabs() const override { return layout_.num_windows(); }
  std::int64_t max_elems() const override { return layout_.segment_elems(); }
  std::int64_t Elems(int host, std::int64_t window) const override {
    return layout_.Elems(window, OwnChunk(host));
  }

  bool IsReady(std::int64_t window) override {
    if (window >= ready_ && packed_ > window &&
        arena_.HaveAll(Arena::kPacked, first_window_ + window + 1)) {
      ready_ = window + 1;
    }
    return window < ready_;
  }

  const void* PutOwn(int host, std::int64_t window, void* staging) override {
    const StageTimer timer(stages_, Stage::kReduce);
    const std::int64_t begin = layout_.Begin(OwnChunk(host));
    for (const Span& span : layout_.Spans(window, OwnChunk(host))) {
      ReduceToAccumulators(bucket_.dtype, bucket_.op, SourcesOf(window, span), bucket_.before,
                           static_cast<char*>(staging) + (span.offset - begin) * accumulator_bytes_,
                           span.elems);
    }
    return staging;
  }

  void AddOwn(int host, std::int64_t window, Format format, const void* partial,
              void* to) override {
    const StageTimer timer(stages_, Stage::kReduce);
    const std::int64_t begin = layout_.Begin(OwnChunk(host));
    for (const Span& span : layout_.Spans(window, OwnChunk(host))) {
      const std::int64_t at = (span.offset - begin) * accumulator_bytes_;
      AddSources(bucket_, format, static_cast<const char*>(partial) + at, SourcesOf(window, span),
                 static_cast<char*>(to) + at, span.elems);
    }
  }

  const void* AddOwnAndKeep(int host, std::int64_t window, Format format, const void* partial,
                            void*) override {
    const StageTimer timer(stages_, Stage::kReduce);
    const std::int64_t begin = layout_.Begin(OwnChunk(host));
    char* const slot = SlotOf(own(), window);
    const auto spans = layout_.Spans(window, OwnChunk(host));
    for (const Span& span : spans) {
      AddSourcesAndScale(
          bucket_, format,
          static_cast<const char*>(partial) + (span.offset - begin) * accumulator_bytes_,
          SourcesOf(window, span), slot + span.offset * copies_.elem_bytes(), span.elems);
    }
    copies_.CopyOut(spans, slot);
    return PlaceToKeep(host, window);
  }

  const Scale& after() const override { return bucket_.after; }

  void* PlaceToKeep(int host, std::int64_t window) override {
    return SlotOf(own(), window) + layout_.Begin(OwnChunk(host)) * copies_.elem_bytes();
  }

  void Keep(int host, std::int64_t window, const void*) override {
    const StageTimer timer(stages_, Stage::kUnpack);
    copies_.CopyOut(layout_.Spans(window, OwnChunk(host)), SlotOf(own(), window));
  }

  void HaveKept(std::int64_t window) override {
    kept_ = window + 1;
    arena_.SetProgress(Arena::kReduced, first_window_ + kept_);
  }

 private:
  int own() const { return arena_.local_rank(); }
  // The chunk of this rank's lane that a host begins.
  int OwnChunk(int host) const { return layout_.ChunkOf(own(), host); }
  char* SlotOf(int local_rank, std::int64_t window) const {
    return arena_.Slot(local_rank, first_window_ + window);
  }

  // The operands of a span of this rank's lane: the others' slots and its own tensor, by rank.
  const std::vector<const void*>& SourcesOf(std::int64_t window, const Span& span) {
    sources_.resize(arena_.local_size());
    for (int rank = 0; rank < arena_.local_size(); ++rank) {
      sources_[rank] =
          rank == own() ? span.input : SlotOf(rank, window) + span.offset * copies_.elem_bytes();
    }
    return sources_;
  }

  Arena& arena_;
  Stages* const stages_;
  const Bucket& bucket_;
  const HostLayout& layout_;
  const int num_lanes_;
  const SlotCopies copies_;
  const std::int64_t accumulator_bytes_;
  const std::int64_t first_window_;
  std::int64_t packed_ = 0;  // windows, as all of these
  std::int64_t ready_ = 0;   // packed by all
  std::int64_t kept_ = 0;    // summed over all hosts, in this rank's lane
  std::int64_t copied_ = 0;
  std::vector<const void*> sources_;
};

}  // namespace

Between BetweenHosts(const Wire& world) {
  const Topology& topology = world.transport->topology();
  Between between{world, topology.num_nodes(), topology.num_lanes()};
  between.across.members.clear();
  const int local_rank = topology.local_rank(world.transport->rank());
  for (int host = 0; host < between.num_hosts; ++host) {
    for (const int rank : world.members) {
      if (topology.node_of[rank] == host && topology.local_rank(rank) == local_rank) {
        between.across.members.push_back(rank);
      }
    }
  }
  return between;
}

void HierarchicalAllreduce(const LocalWire& local, const Between& between, const Bucket& bucket) {
  const HostLayout layout(bucket, between.num_hosts, between.num_lanes, local.arena->slot_bytes());
  // Nothing is encoded in a step that is all latency; with a codec the bits would be others.
  if (bucket.codec == nullptr && layout.num_windows() <= 1 &&
      TravelsWhole(layout.num_chunks() * layout.segment_elems() * layout.elem_bytes(),
                   between.num_hosts)) {
    return ExchangeHostSums(local, between, layout, bucket);
  }
  const Wire& across = between.across;
  Host host(local, layout, between.num_lanes, bucket);
  std::unique_ptr<RingAllreducePlan> plan;
  std::unique_ptr<Exchanges> ring;
  if (host.has_lane()) {
    plan = std::make_unique<RingAllreducePlan>(across.rank(), across.size(), &host, bucket.codec);
    ring = std::make_unique<Exchanges>(across, plan.get());
  }
  if (host.num_slabs() > kRingDepth) local.idle->ExpectBulk();
  try {
    const auto is_done = [&] { return host.is_done() && (ring == nullptr || ring->is_done()); };
    while (!is_done()) {
      const std::uint32_t seen = across.transport->bell()->count.load();
      bool has_moved = host.Pack();
      has_moved = (ring != nullptr && ring->Advance()) || has_moved;
      has_moved = host.CopyOut() || has_moved;
      if (has_moved) {
        local.idle->Reset();
      } else {
        local.idle->Step(seen, /*rings=*/ring == nullptr || !ring->is_in_flight());
      }
    }
  } catch (...) {
    KeepForever(std::move(plan));
    KeepForever(local.arena->owner());
    throw;
  }
  FinishAt(local, host.end_window());
}

}  // namespace keras_ring
