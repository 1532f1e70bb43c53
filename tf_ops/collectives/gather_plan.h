// The exchanges of a ring allgather, whatever the members' blocks are made of.
#ifndef KERAS_RING_COLLECTIVES_GATHER_PLAN_H_
#define KERAS_RING_COLLECTIVES_GATHER_PLAN_H_

#include <cstdint>
#include <vector>

#include "collectives/exchange.h"
#include "collectives/schedule.h"

namespace keras_ring {

// The memory of a block, in pieces that follow each other.
using Pieces = std::vector<MutableBytes>;

// Everything lands where it belongs and is sent on from there, so there is no staging at all.
class RingAllgatherPlan : public ExchangePlan {
 public:
  // `blocks` by member; this rank's own is there already. Cut alike on all ranks.
  RingAllgatherPlan(int rank, const std::vector<Pieces>& blocks, std::int64_t segment_bytes);

  std::int64_t num_exchanges() const override {
    return num_segments_ * static_cast<std::int64_t>(steps_.size());
  }
  std::int64_t SendDependsOn(std::int64_t i) const override;
  std::int64_t MemoryDependsOn(std::int64_t) const override { return -1; }
  std::int64_t OverwritesSendsBelow(std::int64_t) const override { return 0; }
  ConstBytes SendSource(std::int64_t i) override;
  MutableBytes RecvTarget(std::int64_t i) override;
  void Received(std::int64_t i) override;

  // Bytes that have come, of the others' blocks in the order of RingAllgatherSteps.
  std::int64_t arrived_bytes() const { return arrived_bytes_; }

 private:
  MutableBytes Segment(int member, std::int64_t index) const;

  std::vector<Pieces> segments_;  // by member
  const std::vector<RingStep> steps_;
  std::int64_t num_segments_ = 0;
  std::int64_t arrived_bytes_ = 0;
};

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_GATHER_PLAN_H_
