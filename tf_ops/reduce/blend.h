// The arithmetic of adasum: dot products in float64, and weighted sums of two vectors. Vectors are
// accumulators (see reduce.h) of a floating or complex dtype; a complex one counts as its real and
// imaginary parts.
#ifndef KERAS_RING_REDUCE_BLEND_H_
#define KERAS_RING_REDUCE_BLEND_H_

#include <cstddef>

#include "core/dtype.h"

namespace keras_ring {

struct Dots {
  double ab = 0;
  double aa = 0;
  double bb = 0;
};

bool IsBlendable(DType dtype);

// The order of the additions depends on `elems` alone.
Dots DotsOf(DType dtype, const void* a, const void* b, std::size_t elems);

// to[i] = weight_a * a[i] + weight_b * b[i], in float64, rounded once. `to` may be `a` or `b`.
void Blend(DType dtype, double weight_a, const void* a, double weight_b, const void* b, void* to,
           std::size_t elems);

}  // namespace keras_ring

#endif  // KERAS_RING_REDUCE_BLEND_H_
