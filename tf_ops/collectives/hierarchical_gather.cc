#include "collectives/hierarchical_gather.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "collectives/exchange.h"
#include "collectives/gather_plan.h"
#include "collectives/schedule.h"
#include "collectives/tree.h"
#include "collectives/windows.h"

namespace keras_ring {
namespace {

// What one lane brings to a host, in the order in which it arrives.
class Stream {
 public:
  void Append(const Pieces& pieces) {
    for (const MutableBytes& piece : pieces) {
      if (piece.bytes == 0) continue;
      pieces_.push_back(piece);
      begins_.push_back(bytes_);
      bytes_ += static_cast<std::int64_t>(piece.bytes);
    }
  }

  std::int64_t bytes() const { return bytes_; }

  // Calls `copy(at, bytes)` for the memory of a part of the stream.
  template <typename Copy>
  void ForEach(Range part, const Copy& copy) const {
    auto next = std::upper_bound(begins_.begin(), begins_.end(), part.begin);
    for (auto i = next - begins_.begin() - 1; part.elems() > 0; ++i) {
      const std::int64_t inside = part.begin - begins_[i];
      const std::int64_t bytes =
          std::min(part.elems(), static_cast<std::int64_t>(pieces_[i].bytes) - inside);
      copy(static_cast<char*>(pieces_[i].data) + inside, bytes);
      part.begin += bytes;
    }
  }

 private:
  Pieces pieces_;
  std::vector<std::int64_t> begins_;
  std::int64_t bytes_ = 0;
};

// Hands what the lanes bring to all ranks of the host, window by window, while it comes.
class Distribution {
 public:
  // `streams` by lane.
  Distribution(const LocalWire& wire, std::vector<Stream> streams)
      : arena_(*wire.arena),
        streams_(std::move(streams)),
        slot_bytes_(static_cast<std::int64_t>(arena_.slot_bytes())),
        first_window_(arena_.first_window) {
    for (const Stream& stream : streams_) {
      num_windows_ = std::max(num_windows_, (stream.bytes() + slot_bytes_ - 1) / slot_bytes_);
    }
  }

  bool has_lane() const { return arena_.local_rank() < static_cast<int>(streams_.size()); }
  bool is_done() const {
    return copied_ == num_windows_ && (!has_lane() || packed_ == num_windows_);
  }
  std::int64_t num_windows() const { return num_windows_; }
  std::int64_t end_window() const { return first_window_ + num_windows_; }

  // Puts the next window of this rank's lane into its slot, if that much has come.
  bool Pack(std::int64_t arrived_bytes) {
    if (!has_lane() || packed_ == num_windows_) return false;
    const Stream& stream = streams_[arena_.local_rank()];
    const Range window = Window(stream, packed_);
    if (arrived_bytes < window.end ||
        !arena_.HaveAll(Arena::kCopied, first_window_ + packed_ + 1 - arena_.num_slots())) {
      return false;
    }
    if (arena_.local_size() > 1) {
      char* to = arena_.Slot(arena_.local_rank(), first_window_ + packed_);
      stream.ForEach(window, [&to](const char* from, std::int64_t bytes) {
        std::memcpy(to, from, bytes);
        to += bytes;
      });
    }
    arena_.SetProgress(Arena::kPacked, first_window_ + ++packed_);
    return true;
  }

  bool CopyOut() {
    if (copied_ == num_windows_) return false;
    for (int lane = 0; lane < static_cast<int>(streams_.size()); ++lane) {
      if (lane == arena_.local_rank()) continue;
      if (arena_.Progress(lane, Arena::kPacked) < first_window_ + copied_ + 1) return false;
    }
    for (int lane = 0; lane < static_cast<int>(streams_.size()); ++lane) {
      if (lane == arena_.local_rank()) continue;
      const char* from = arena_.Slot(lane, first_window_ + copied_);
      streams_[lane].ForEach(Window(streams_[lane], copied_),
                             [&from](char* to, std::int64_t bytes) {
                               std::memcpy(to, from, bytes);
                               from += bytes;
                             });
    }
    arena_.SetProgress(Arena::kCopied, first_window_ + ++copied_);
    return true;
  }

 private:
  Range Window(const Stream& stream, std::int64_t window) const {
    return {std::min(window * slot_bytes_, stream.bytes()),
            std::min((window + 1) * slot_bytes_, stream.bytes())};
  }

  Arena& arena_;
  const std::vector<Stream> streams_;
  const std::int64_t slot_bytes_;
  const std::int64_t first_window_;
  std::int64_t num_windows_ = 0;
  std::int64_t packed_ = 0;
  std::int64_t copied_ = 0;
};

}  // namespace

void HierarchicalBroadcast(const LocalWire& local, const Wire& world, int root, void* data,
                           std::int64_t bytes) {
  const Topology& topology = world.transport->topology();
  const int own_host = topology.node_of[world.transport->rank()];
  // By host, who speaks for it.
  Wire speakers = world;
  speakers.members.assign(topology.num_nodes(), -1);
  for (int rank = topology.size() - 1; rank >= 0; --rank) {
    speakers.members[topology.node_of[rank]] = rank;
  }
  speakers.members[topology.node_of[root]] = root;
  const int speaker = speakers.members[own_host];
  const int local_root = topology.local_rank(speaker);
  if (speaker != world.transport->rank()) {
    return LocalBroadcast(local, local_root, data, bytes);
  }
  TreeBroadcaster tree(speakers, topology.node_of[root], data, bytes);
  if (local.arena->local_size() > 1) {
    LocalBroadcast(local, local_root, data, bytes,
                   [&tree](std::int64_t end) { tree.AwaitUntil(end); });
  }
  tree.Finish();
}

void HierarchicalAllgather(const LocalWire& local, const Between& between, const void* input,
                           const std::vector<std::int64_t>& block_bytes, void* output) {
  const Wire& across = between.across;
  const Topology& topology = across.transport->topology();
  const int own_host = topology.node_of[across.transport->rank()];
  Pieces own_blocks;  // of the ranks of this host
  std::vector<std::vector<Pieces>> blocks(between.num_lanes,
                                          std::vector<Pieces>(between.num_hosts));
  std::vector<int> num_ranks(between.num_hosts, 0);  // seen so far
  char* at = static_cast<char*>(output);
  for (int rank = 0; rank < topology.size(); at += block_bytes[rank++]) {
    const int host = topology.node_of[rank];
    const MutableBytes block{at, static_cast<std::size_t>(block_bytes[rank])};
    blocks[num_ranks[host]++ % between.num_lanes][host].push_back(block);
    if (host == own_host) own_blocks.push_back(block);
  }
  LocalAllgather(local, input, own_blocks);

  std::vector<Stream> streams(between.num_lanes);
  for (int lane = 0; lane < between.num_lanes; ++lane) {
    for (const RingStep& step : RingAllgatherSteps(own_host, between.num_hosts)) {
      streams[lane].Append(blocks[lane][step.recv_chunk]);
    }
  }
  Distribution distribution(local, std::move(streams));
  std::unique_ptr<RingAllgatherPlan> plan;
  std::unique_ptr<Exchanges> ring;
  if (distribution.has_lane()) {
    plan = std::make_unique<RingAllgatherPlan>(own_host, blocks[local.arena->local_rank()],
                                               across.segment_bytes);
    ring = std::make_unique<Exchanges>(across, plan.get());
  }
  if (distribution.num_windows() > 1) local.idle->ExpectBulk();
  const auto is_done = [&] {
    return distribution.is_done() && (ring == nullptr || ring->is_done());
  };
  while (!is_done()) {
    const std::uint32_t seen = across.transport->bell()->count.load();
    bool has_moved = ring != nullptr && ring->Advance();
    has_moved = (plan != nullptr && distribution.Pack(plan->arrived_bytes())) || has_moved;
    has_moved = distribution.CopyOut() || has_moved;
    if (has_moved) {
      local.idle->Reset();
    } else {
      local.idle->Step(seen, /*rings=*/ring == nullptr || !ring->is_in_flight());
    }
  }
  FinishAt(local, distribution.end_window());
}

}  // namespace keras_ring
