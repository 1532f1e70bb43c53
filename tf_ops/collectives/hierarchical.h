// Allreduce over several hosts with equally many ranks: shared memory within, rings between.
#ifndef KERAS_RING_COLLECTIVES_HIERARCHICAL_H_
#define KERAS_RING_COLLECTIVES_HIERARCHICAL_H_

#include "collectives/local.h"
#include "collectives/ring.h"
#include "collectives/wire.h"

namespace keras_ring {

// Each local rank sums its part of the host's inputs and rings it with its counterparts, the ranks
// of the same local number on the other hosts, which are the members of `across`.
// Cost: 2(H-1) steps and 2(H-1)/H * S/L bytes sent per rank, for H hosts of L ranks.
// Source: Mikami et al., Massively distributed SGD: ImageNet/ResNet-50 training in a flash, 2018
// (2D-torus allreduce), with the host's dimension in shared memory.
void HierarchicalAllreduce(const LocalWire& local, const Wire& across, const Bucket& bucket);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_HIERARCHICAL_H_
