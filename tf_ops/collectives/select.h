// Which algorithm runs a collective: the one place that knows thresholds.
#ifndef KERAS_RING_COLLECTIVES_SELECT_H_
#define KERAS_RING_COLLECTIVES_SELECT_H_

#include "core/algorithm.h"
#include "transport/topology.h"

namespace keras_ring {

// Pure. What can run here of what was wished: kLocal within one host, kHierarchical between hosts
// with as many ranks each, kRing everywhere; `has_arena`: the ranks of a host share memory.
Algorithm SelectAllreduce(Algorithm wished, const Topology& topology, bool has_arena);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_SELECT_H_
