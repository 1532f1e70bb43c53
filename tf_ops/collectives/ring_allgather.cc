#include <algorithm>
#include <cstring>

#include "collectives/exchange.h"
#include "collectives/ring.h"
#include "collectives/schedule.h"

namespace keras_ring {
namespace {

// Everything lands where it belongs and is sent on from there, so there is no staging at all.
class AllgatherPlan : public ExchangePlan {
 public:
  AllgatherPlan(const Wire& wire, const std::vector<std::int64_t>& block_bytes, char* output)
      : block_bytes_(block_bytes),
        output_(output),
        steps_(RingAllgatherSteps(wire.rank(), wire.size())),
        segment_bytes_(wire.segment_bytes),
        num_segments_(
            (*std::max_element(block_bytes.begin(), block_bytes.end()) + segment_bytes_ - 1) /
            segment_bytes_) {
    for (std::size_t rank = 0, begin = 0; rank < block_bytes.size(); ++rank) {
      begin_.push_back(static_cast<std::int64_t>(begin));
      begin += block_bytes[rank];
    }
  }

  std::int64_t num_exchanges() const override {
    return num_segments_ * static_cast<std::int64_t>(steps_.size());
  }
  std::int64_t SendDependsOn(std::int64_t i) const override {
    return std::max<std::int64_t>(i - num_segments_, -1);
  }
  std::int64_t MemoryDependsOn(std::int64_t) const override { return -1; }
  std::int64_t OverwritesSendsBelow(std::int64_t) const override { return 0; }

  ConstBytes SendSource(std::int64_t i) override {
    const MutableBytes segment = Segment(steps_[i / num_segments_].send_chunk, i % num_segments_);
    return {segment.data, segment.bytes};
  }
  MutableBytes RecvTarget(std::int64_t i) override {
    return Segment(steps_[i / num_segments_].recv_chunk, i % num_segments_);
  }
  void Received(std::int64_t) override {}

 private:
  MutableBytes Segment(int rank, std::int64_t index) const {
    const std::int64_t begin = std::min(index * segment_bytes_, block_bytes_[rank]);
    const std::int64_t end = std::min(begin + segment_bytes_, block_bytes_[rank]);
    return {output_ + begin_[rank] + begin, static_cast<std::size_t>(end - begin)};
  }

  const std::vector<std::int64_t>& block_bytes_;
  char* const output_;
  const std::vector<RingStep> steps_;
  const std::int64_t segment_bytes_;
  const std::int64_t num_segments_;
  std::vector<std::int64_t> begin_;
};

}  // namespace

void RingAllgather(const Wire& wire, const void* input,
                   const std::vector<std::int64_t>& block_bytes, void* output) {
  char* const bytes = static_cast<char*>(output);
  AllgatherPlan plan(wire, block_bytes, bytes);
  std::int64_t begin = 0;
  for (int rank = 0; rank < wire.rank(); ++rank) begin += block_bytes[rank];
  const std::int64_t own_bytes = block_bytes[wire.rank()];
  if (own_bytes > 0 && bytes + begin != input) std::memcpy(bytes + begin, input, own_bytes);
  RunExchanges(wire, &plan);
}

}  // namespace keras_ring
