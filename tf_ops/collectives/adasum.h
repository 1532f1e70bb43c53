// Adasum: an allreduce that adds gradients which point in different directions and averages those
// which point in the same, so that the step does not have to shrink as ranks are added.
#ifndef KERAS_RING_COLLECTIVES_ADASUM_H_
#define KERAS_RING_COLLECTIVES_ADASUM_H_

#include "collectives/ring.h"
#include "collectives/wire.h"

namespace keras_ring {

// Every rank calls it with a bucket of the same shape; all hold the same bits afterwards. `op` is
// not looked at; the dtype is one that IsBlendable. Two tensors combine to
//
//   (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b
//
// with dot products over the tensor, in float64; a tensor of zeros adds nothing. The ranks combine
// in a binary tree of neighbours: (0, 1), (2, 3), then these pairs, and so on. When their number P
// is no power of two, the first 2 (P - 2^k) ranks combine in pairs beforehand, and each pair counts
// as one rank of 2^k: three ranks are ((0, 1), 2).
// Cost: 2 log2(P) exchanges of tensors, 2 (P-1)/P * S bytes sent per rank as accumulators, and
// log2(P)^2 / 2 small ones; for P that is no power of two another 2 S on the ranks that pair.
// Memory: 2 S. Source: Maleki et al., Scaling distributed training with adaptive summation, 2020
// (algorithm 1).
void Adasum(const Wire& wire, const Bucket& bucket);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_ADASUM_H_
