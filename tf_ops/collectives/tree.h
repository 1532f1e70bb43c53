// Broadcast down a binary tree, in segments.
#ifndef KERAS_RING_COLLECTIVES_TREE_H_
#define KERAS_RING_COLLECTIVES_TREE_H_

#include <cstdint>
#include <vector>

#include "collectives/wire.h"

namespace keras_ring {

// Fills `data` on every rank with the root's; `bytes` is the same everywhere.
// Cost: log2(P) hops; each rank sends at most 2 S bytes.
// Source: Sanders, Speck & Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and
// scan, Parallel Computing 2009 (section 2, the single pipelined tree).
void TreeBroadcast(const Wire& wire, int root, void* data, std::int64_t bytes);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_TREE_H_
