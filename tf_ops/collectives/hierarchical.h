// Allreduce over several hosts: shared memory within, rings between.
#ifndef KERAS_RING_COLLECTIVES_HIERARCHICAL_H_
#define KERAS_RING_COLLECTIVES_HIERARCHICAL_H_

#include "collectives/local.h"
#include "collectives/ring.h"
#include "collectives/wire.h"

namespace keras_ring {

// How the ranks of a host reach the others.
struct Between {
  Wire across;  // the ranks with this one's local number: one on each host, in their order, if it
                // has a lane
  int num_hosts = 1;
  int num_lanes = 1;
};

// `world` is the wire of all ranks.
Between BetweenHosts(const Wire& world);

// The data is cut into as many lanes as the smallest host has ranks, and those into one chunk for
// each host. Lane l is the work of the ranks with local number l: each
// sums its host's inputs straight from the slots, rings the sums with its counterparts and leaves
// the results in its slot for the others. Packing, summing, sending and copying out go on beside
// each other, for several windows at once; only the rings of ranks that have a lane use the
// network. Ranks without one (`local_rank >= num_lanes`) pack and copy.
// Cost: 2(H-1) steps and 2(H-1)/H * S/num_lanes bytes sent per rank with a lane, for H hosts;
// half of it or a quarter with a 16-bit codec.
// Source: Mikami et al., Massively distributed SGD: ImageNet/ResNet-50 training in a flash, 2018
// (2D-torus allreduce), with the host's dimension in shared memory.
void HierarchicalAllreduce(const LocalWire& local, const Between& between, const Bucket& bucket);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_HIERARCHICAL_H_
