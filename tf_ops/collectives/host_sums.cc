#include "collectives/host_sums.h"

#include <memory>
#include <utility>
#include <vector>

#include "collectives/windows.h"
#include "transport/kept.h"

namespace keras_ring {
namespace {

using Span = HostLayout::Span;

class Leader {
 public:
  Leader(const LocalWire& local, const Wire& across, const HostLayout& layout, const Bucket& bucket)
      : arena_(*local.arena),
        stages_(local.stages),
        idle_(local.idle),
        across_(across),
        layout_(layout),
        bucket_(bucket),
        accumulator_bytes_(static_cast<std::int64_t>(AccumulatorBytes(bucket.dtype))),
        bytes_(layout.num_chunks() * layout.segment_elems() * accumulator_bytes_),
        sums_(across.size(), std::vector<char>(bytes_)) {}

  // All hosts' sums, by host.
  void Exchange() {
    SumInputs(sums_[across_.rank()].data());
    std::vector<Transport::Transfer> transfers;
    for (int host = 0; host < across_.size(); ++host) {
      if (host == across_.rank()) continue;
      transfers.push_back(across_.transport->Recv(across_.peer(host), sums_[host].data(), bytes_));
    }
    for (int host = 0; host < across_.size(); ++host) {
      if (host == across_.rank()) continue;
      transfers.push_back(
          across_.transport->Send(across_.peer(host), sums_[across_.rank()].data(), bytes_));
    }
    for (const Transport::Transfer transfer : transfers) across_.transport->Wait(transfer, idle_);
  }

  // Adds them up in the order of the ring.
  void Finish(char* slot) {
    const StageTimer timer(stages_, Stage::kReduce);
    std::vector<char> sums(layout_.segment_elems() * accumulator_bytes_);
    for (int chunk = 0; chunk < layout_.num_chunks(); ++chunk) {
      const std::int64_t elems = layout_.Elems(0, chunk);
      if (elems == 0) continue;
      std::vector<const void*> sources;
      for (int step = 0; step < across_.size(); ++step) {
        const int host = (layout_.HostOf(chunk) + step) % across_.size();
        sources.push_back(sums_[host].data() + layout_.Begin(chunk) * accumulator_bytes_);
      }
      ReduceToAccumulators(AccumulatorDType(bucket_.dtype), bucket_.op, sources, Scale{},
                           sums.data(), elems);
      ScaleTo(bucket_.dtype, Format::kAccumulator, sums.data(), bucket_.after,
              slot + layout_.Begin(chunk) * layout_.elem_bytes(), elems);
    }
  }

  // After a failure.
  void Abandon() { KeepForever(std::make_shared<decltype(sums_)>(std::move(sums_))); }

 private:
  void SumInputs(char* sums) {
    const StageTimer timer(stages_, Stage::kReduce);
    std::vector<const void*> sources(arena_.local_size());
    for (int chunk = 0; chunk < layout_.num_chunks(); ++chunk) {
      for (const Span& span : layout_.Spans(0, chunk)) {
        for (int rank = 0; rank < arena_.local_size(); ++rank) {
          sources[rank] = rank == arena_.local_rank() ? span.input
                                                      : arena_.Slot(rank, arena_.first_window) +
                                                            span.offset * layout_.elem_bytes();
        }
        ReduceToAccumulators(bucket_.dtype, bucket_.op, sources, bucket_.before,
                             sums + span.offset * accumulator_bytes_, span.elems);
      }
    }
  }

  const Arena& arena_;
  Stages* const stages_;
  Idle* const idle_;
  const Wire& across_;
  const HostLayout& layout_;
  const Bucket& bucket_;
  const std::int64_t accumulator_bytes_;
  const std::int64_t bytes_;
  std::vector<std::vector<char>> sums_;  // by host, accumulators of all chunks
};

}  // namespace

void ExchangeHostSums(const LocalWire& local, const Between& between, const HostLayout& layout,
                      const Bucket& bucket) {
  Arena& arena = *local.arena;
  const std::int64_t end = arena.first_window + layout.num_windows();
  if (layout.num_windows() == 0) return;
  const SlotCopies copies(bucket);
  char* const own_slot = arena.Slot(arena.local_rank(), arena.first_window);
  AwaitAll(local, Arena::kCopied, end - arena.num_slots());
  if (arena.local_rank() == 0) {
    AwaitAll(local, Arena::kPacked, end);
    Leader leader(local, between.across, layout, bucket);
    try {
      leader.Exchange();
    } catch (...) {
      leader.Abandon();
      throw;
    }
    leader.Finish(own_slot);
    arena.SetProgress(Arena::kReduced, end);
  } else {
    {
      const StageTimer timer(local.stages, Stage::kPack);
      for (int chunk = 0; chunk < layout.num_chunks(); ++chunk) {
        copies.Pack(layout.Spans(0, chunk), own_slot);
      }
      arena.SetProgress(Arena::kPacked, end);
    }
    Await(local, [&] { return arena.Progress(0, Arena::kReduced) >= end; });
  }
  {
    const StageTimer timer(local.stages, Stage::kUnpack);
    for (int chunk = 0; chunk < layout.num_chunks(); ++chunk) {
      copies.CopyOut(layout.Spans(0, chunk), arena.Slot(0, arena.first_window));
    }
  }
  FinishAt(local, end);
}

}  // namespace keras_ring
