#include "reduce/neutral.h"

#include <algorithm>
#include <complex>
#include <limits>
#include <type_traits>

namespace keras_ring {
namespace {

// As an accumulator; complex numbers have no order.
template <typename A>
A Neutral(ReduceOp op) {
  if (op == ReduceOp::kSum) return A(0);
  if (op == ReduceOp::kProduct) return A(1);
  if constexpr (std::is_floating_point_v<A>) {
    const A most = std::numeric_limits<A>::infinity();
    return op == ReduceOp::kMin ? most : -most;
  } else if constexpr (std::is_integral_v<A>) {
    return op == ReduceOp::kMin ? std::numeric_limits<A>::max() : std::numeric_limits<A>::lowest();
  } else {
    return A(0);
  }
}

}  // namespace

void FillNeutral(DType dtype, ReduceOp op, void* to, std::size_t elems) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator)                                    \
  case DType::enumerator:                                                                          \
    std::fill_n(static_cast<storage*>(to), elems, static_cast<storage>(Neutral<accumulator>(op))); \
    return;
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
}

}  // namespace keras_ring
