// Casts between the floats that are computed in and the 16-bit ones that travel.
#ifndef KERAS_RING_REDUCE_NARROW_H_
#define KERAS_RING_REDUCE_NARROW_H_

#include <cstdint>

#include "core/dtype.h"

namespace keras_ring {

// Both: `wide` is float32 or float64, `narrow` float16 or bfloat16. The memory does not overlap.

// Rounds once, to nearest, ties to even; what is too large becomes infinity.
void Narrow(DType wide, const void* from, DType narrow, void* to, std::int64_t elems);

// Exact.
void Expand(DType narrow, const void* from, DType wide, void* to, std::int64_t elems);

}  // namespace keras_ring

#endif  // KERAS_RING_REDUCE_NARROW_H_
