#include "collectives/gather_plan.h"

#include <algorithm>

namespace keras_ring {

RingAllgatherPlan::RingAllgatherPlan(int rank, const std::vector<Pieces>& blocks,
                                     std::int64_t segment_bytes)
    : segments_(blocks.size()), steps_(RingAllgatherSteps(rank, static_cast<int>(blocks.size()))) {
  const auto most = static_cast<std::size_t>(segment_bytes);
  for (std::size_t member = 0; member < blocks.size(); ++member) {
    for (const MutableBytes& piece : blocks[member]) {
      for (std::size_t begin = 0; begin < piece.bytes; begin += most) {
        segments_[member].push_back(
            {static_cast<char*>(piece.data) + begin, std::min(most, piece.bytes - begin)});
      }
    }
    num_segments_ = std::max(num_segments_, static_cast<std::int64_t>(segments_[member].size()));
  }
}

std::int64_t RingAllgatherPlan::SendDependsOn(std::int64_t i) const {
  return std::max<std::int64_t>(i - num_segments_, -1);
}

ConstBytes RingAllgatherPlan::SendSource(std::int64_t i) {
  const MutableBytes segment = Segment(steps_[i / num_segments_].send_chunk, i % num_segments_);
  return {segment.data, segment.bytes};
}

MutableBytes RingAllgatherPlan::RecvTarget(std::int64_t i) {
  return Segment(steps_[i / num_segments_].recv_chunk, i % num_segments_);
}

void RingAllgatherPlan::Received(std::int64_t i) {
  arrived_bytes_ += static_cast<std::int64_t>(RecvTarget(i).bytes);
}

MutableBytes RingAllgatherPlan::Segment(int member, std::int64_t index) const {
  const Pieces& segments = segments_[member];
  return index < static_cast<std::int64_t>(segments.size()) ? segments[index] : MutableBytes{};
}

}  // namespace keras_ring
