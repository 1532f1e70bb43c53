#include "reduce/blend.h"

#include "reduce/ieee_mode.h"

namespace keras_ring {
namespace {

// Sums kept beside each other, so that the compiler can vectorise without reordering additions.
constexpr std::size_t kLanes = 8;

template <typename T>
Dots DotsTyped(const T* a, const T* b, std::size_t elems) {
  double ab[kLanes] = {};
  double aa[kLanes] = {};
  double bb[kLanes] = {};
  const auto add = [&](std::size_t lane, double x, double y) {
    ab[lane] += x * y;
    aa[lane] += x * x;
    bb[lane] += y * y;
  };
  std::size_t i = 0;
  for (; i + kLanes <= elems; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      add(lane, static_cast<double>(a[i + lane]), static_cast<double>(b[i + lane]));
    }
  }
  for (std::size_t lane = 0; i < elems; ++i, ++lane) {
    add(lane, static_cast<double>(a[i]), static_cast<double>(b[i]));
  }
  Dots dots;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    dots.ab += ab[lane];
    dots.aa += aa[lane];
    dots.bb += bb[lane];
  }
  return dots;
}

template <typename T>
void BlendTyped(double weight_a, const T* a, double weight_b, const T* b, T* to,
                std::size_t elems) {
  for (std::size_t i = 0; i < elems; ++i) {
    to[i] =
        static_cast<T>(weight_a * static_cast<double>(a[i]) + weight_b * static_cast<double>(b[i]));
  }
}

// Calls `body` with pointers' type and the number of real numbers.
template <typename Body>
auto WithReals(DType dtype, std::size_t elems, const Body& body) {
  const std::size_t reals = IsComplex(dtype) ? 2 * elems : elems;
  return dtype == DType::kFloat64 || dtype == DType::kComplex128 ? body(double{}, reals)
                                                                 : body(float{}, reals);
}

}  // namespace

bool IsBlendable(DType dtype) { return IsFloating(dtype) || IsComplex(dtype); }

Dots DotsOf(DType dtype, const void* a, const void* b, std::size_t elems) {
  const IeeeMode mode;
  return WithReals(dtype, elems, [&](auto real, std::size_t reals) {
    using T = decltype(real);
    return DotsTyped(static_cast<const T*>(a), static_cast<const T*>(b), reals);
  });
}

void Blend(DType dtype, double weight_a, const void* a, double weight_b, const void* b, void* to,
           std::size_t elems) {
  const IeeeMode mode;
  WithReals(dtype, elems, [&](auto real, std::size_t reals) {
    using T = decltype(real);
    BlendTyped(weight_a, static_cast<const T*>(a), weight_b, static_cast<const T*>(b),
               static_cast<T*>(to), reals);
  });
}

}  // namespace keras_ring
