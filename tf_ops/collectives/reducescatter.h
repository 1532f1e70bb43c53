// Reducescatter: every rank gets the sum of one part. Over a ring of messages; in the memory of one
// host see local_parts.h.
#ifndef KERAS_RING_COLLECTIVES_REDUCESCATTER_H_
#define KERAS_RING_COLLECTIVES_REDUCESCATTER_H_

#include <cstdint>

#include "collectives/ring.h"
#include "collectives/wire.h"

namespace keras_ring {

// Adds a tensor of `rows` rows to a bucket whose chunk r is what rank r gets: so many whole rows,
// one more on the first ranks when they do not divide. `output` is where `rank` gets its own.
void AddRows(const void* input, std::int64_t rows, std::int64_t row_elems, int rank, int size,
             void* output, Bucket* bucket);

// Every rank calls it with a bucket of the same shape made by AddRows; only outputs of the rank's
// own chunk are written. They do not overlap inputs.
// Cost: P-1 steps; (P-1)/P * S bytes sent per rank, partial sums of 16-bit floats as float32 (none
// on two ranks). Staging memory: a few segments.
// Source: Patarasuk & Yuan, JPDC 2009: the first half of their allreduce.
void RingReducescatter(const Wire& wire, const Bucket& bucket);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_REDUCESCATTER_H_
