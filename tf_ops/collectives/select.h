// Which algorithm runs a collective: the one place that knows thresholds.
#ifndef KERAS_RING_COLLECTIVES_SELECT_H_
#define KERAS_RING_COLLECTIVES_SELECT_H_

#include <cstddef>
#include <cstdint>

#include "core/algorithm.h"
#include "transport/topology.h"

namespace keras_ring {

// Pure. What can run here of what was wished: kLocal within one host, kHierarchical between hosts
// whose slots have room for an element of every chunk, kRing everywhere.
// `slot_bytes`: of the memory that the ranks of a host share; 0: they share none.
Algorithm SelectAllreduce(Algorithm wished, const Topology& topology, std::size_t slot_bytes);

// Pure. The same for collectives that only move data.
Algorithm SelectMovement(const Topology& topology, std::size_t slot_bytes);

// Pure. Whether between hosts it pays to send each other a bucket of this size whole, in one step,
// rather than in the 2 (H-1) steps of a ring, in which it travels 2 (H-1) / H times instead of H-1.
bool TravelsWhole(std::int64_t bytes, int num_hosts);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_SELECT_H_
