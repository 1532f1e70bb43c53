// Broadcast and allgather over several hosts: each byte comes to a host over the network once, and
// to its other ranks through shared memory. For any numbers of ranks.
#ifndef KERAS_RING_COLLECTIVES_HIERARCHICAL_GATHER_H_
#define KERAS_RING_COLLECTIVES_HIERARCHICAL_GATHER_H_

#include <cstdint>
#include <vector>

#include "collectives/hierarchical.h"
#include "collectives/local.h"
#include "collectives/wire.h"

namespace keras_ring {

// See TreeBroadcast; the tree joins the root and the leaders of the other hosts. `world` is the
// wire of all ranks, `root` one of them.
void HierarchicalBroadcast(const LocalWire& local, const Wire& world, int root, void* data,
                           std::int64_t bytes);

// See RingAllgather; the ring of each lane joins its ranks of all hosts and carries the blocks of
// every num_lanes-th rank of a host.
void HierarchicalAllgather(const LocalWire& local, const Between& between, const void* input,
                           const std::vector<std::int64_t>& block_bytes, void* output);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_HIERARCHICAL_GATHER_H_
