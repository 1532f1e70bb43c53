// The values that change no result: what a rank brings that has nothing to bring.
#ifndef KERAS_RING_REDUCE_NEUTRAL_H_
#define KERAS_RING_REDUCE_NEUTRAL_H_

#include <cstddef>

#include "core/dtype.h"
#include "reduce/reduce.h"

namespace keras_ring {

// Zeros for a sum, ones for a product; for min and max what no element is beyond. Tensor elements.
void FillNeutral(DType dtype, ReduceOp op, void* to, std::size_t elems);

}  // namespace keras_ring

#endif  // KERAS_RING_REDUCE_NEUTRAL_H_
