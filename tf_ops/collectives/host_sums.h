// Small allreduces between hosts: the hosts' sums travel as a whole, once, to everybody.
#ifndef KERAS_RING_COLLECTIVES_HOST_SUMS_H_
#define KERAS_RING_COLLECTIVES_HOST_SUMS_H_

#include "collectives/hierarchical.h"
#include "collectives/host_layout.h"
#include "collectives/local.h"
#include "collectives/ring.h"

namespace keras_ring {

// As HierarchicalAllreduce, to the last bit, for a layout of one window at most. The leader sums
// the host's inputs and exchanges them with every other leader; no other rank uses the network.
// Cost: one step; (H-1) S bytes sent per leader, for H hosts.
void ExchangeHostSums(const LocalWire& local, const Between& between, const HostLayout& layout,
                      const Bucket& bucket);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_HOST_SUMS_H_
