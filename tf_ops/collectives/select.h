// Which algorithm runs a collective: the one place that knows thresholds.
#ifndef KERAS_RING_COLLECTIVES_SELECT_H_
#define KERAS_RING_COLLECTIVES_SELECT_H_

#include <cstddef>

#include "core/algorithm.h"
#include "transport/topology.h"

namespace keras_ring {

// Pure. What can run here of what was wished: kLocal within one host, kHierarchical between hosts
// whose slots have room for an element of every chunk, kRing everywhere.
// `slot_bytes`: of the memory that the ranks of a host share; 0: they share none.
Algorithm SelectAllreduce(Algorithm wished, const Topology& topology, std::size_t slot_bytes);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_SELECT_H_
