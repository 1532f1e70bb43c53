// The only arithmetic of the library: combine two operands, scale, cast. It knows no rank and no
// message. Type-erased on purpose: a ring templated over types and operations would compile for
// minutes and gain nothing, since each call works on a segment of a hundred kilobytes. The bits of
// a result depend neither on the processor (see level.h) nor on the calling thread's rounding mode.
#ifndef KERAS_RING_REDUCE_REDUCE_H_
#define KERAS_RING_REDUCE_REDUCE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtype.h"

namespace keras_ring {

enum class ReduceOp : std::uint8_t { kSum, kMin, kMax, kProduct };

const char* ReduceOpName(ReduceOp op);

// Whether `op` has a meaning for `dtype`: bool takes min (all) and max (any), complex numbers have
// no order.
bool IsReducible(DType dtype, ReduceOp op);

// A factor, then a division. Integers are multiplied in float64 and divided with floor, as
// Python's // does, so that a mean of integers equals NumPy's sum // size.
struct Scale {
  double factor = 1.0;
  std::int64_t divisor = 1;

  bool is_identity() const { return factor == 1.0 && divisor == 1; }
};

// How an operand is stored: as in the tensor, or as a partial result (see AccumulatorBytes).
enum class Format : std::uint8_t { kTensor, kAccumulator };

// to[i] = op(partial[i], scale(own[i])), where `to` holds accumulators and `own` tensor elements.
// `to` may be `partial` when that is in accumulator format; other overlaps are not allowed.
void Combine(DType dtype, ReduceOp op, Format partial_format, const void* partial, const void* own,
             const Scale& scale, void* to, std::size_t elems);

// to[i] = after(op(before(sources[0][i]), before(sources[1][i]), ...)), in this order, summed as
// accumulators and rounded once; all in tensor format. `to` may be one of the sources.
void Reduce(DType dtype, ReduceOp op, const std::vector<const void*>& sources, const Scale& before,
            const Scale& after, void* to, std::size_t elems);

// to[i] = op(before(sources[0][i]), ...) as accumulators.
void ReduceToAccumulators(DType dtype, ReduceOp op, const std::vector<const void*>& sources,
                          const Scale& before, void* to, std::size_t elems);

// to[i] = scale(from[i]) as tensor elements. `to` may be `from` when the formats agree.
void ScaleTo(DType dtype, Format from_format, const void* from, const Scale& scale, void* to,
             std::size_t elems);

// to[i] = scale(from[i]) as accumulators, from tensor elements.
void Widen(DType dtype, const void* from, const Scale& scale, void* to, std::size_t elems);

}  // namespace keras_ring

#endif  // KERAS_RING_REDUCE_REDUCE_H_
