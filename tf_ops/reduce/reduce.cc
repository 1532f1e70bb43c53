#include "reduce/reduce.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <type_traits>

// The loops are compiled once for every x86-64 and once for those with AVX2; which of the two runs
// is decided when the library is loaded. `flatten` draws all loops into the function, for only what
// is inside it is compiled twice. Sanitizers do not get along with functions chosen so early.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KERAS_RING_VECTORIZE __attribute__((target_clones("default", "avx2"), flatten))
#else
#define KERAS_RING_VECTORIZE
#endif

namespace keras_ring {
namespace {

template <typename T>
struct IsComplexType : std::false_type {};
template <typename T>
struct IsComplexType<std::complex<T>> : std::true_type {};

template <typename T>
T Multiply(const T& a, const T& b) {
  if constexpr (IsComplexType<T>::value) {
    // The textbook formula, as NumPy uses it: operator* would check every product for NaN and
    // keep the loop from being vectorised.
    return T(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
  } else if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    // Wraps like NumPy: in uint64, because small unsigned types promote to (overflowing) int.
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else {
    return static_cast<T>(a * b);
  }
}

template <typename T>
T Add(const T& a, const T& b) {
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return static_cast<T>(a + b);
  }
}

// NaN wins in min and max on either side, as in NumPy, so that no rank's NaN is lost.
template <typename T>
T Min(const T& a, const T& b) {
  if constexpr (std::is_floating_point_v<T>) return a < b || a != a ? a : b;
  return b < a ? b : a;
}

template <typename T>
T Max(const T& a, const T& b) {
  if constexpr (std::is_floating_point_v<T>) return a > b || a != a ? a : b;
  return a < b ? b : a;
}

template <ReduceOp op, typename T>
T Apply(const T& a, const T& b) {
  if constexpr (op == ReduceOp::kSum) {
    return Add(a, b);
  } else if constexpr (op == ReduceOp::kProduct) {
    return Multiply(a, b);
  } else if constexpr (IsComplexType<T>::value) {
    return a;  // not reached: IsReducible refuses it
  } else if constexpr (op == ReduceOp::kMin) {
    return Min(a, b);
  } else {
    return Max(a, b);
  }
}

template <typename T>
T FloorDivide(T value, std::int64_t divisor) {
  if constexpr (std::is_signed_v<T>) {
    const std::int64_t wide = value;
    const std::int64_t quotient = wide / divisor;
    return static_cast<T>(wide % divisor != 0 && wide < 0 ? quotient - 1 : quotient);
  } else {
    return static_cast<T>(value / static_cast<std::uint64_t>(divisor));
  }
}

template <typename A>
A Scaled(const A& value, const Scale& scale) {
  if constexpr (std::is_same_v<A, bool>) {
    return value;
  } else if constexpr (std::is_integral_v<A>) {
    const A product =
        scale.factor == 1.0 ? value : static_cast<A>(static_cast<double>(value) * scale.factor);
    return scale.divisor == 1 ? product : FloorDivide(product, scale.divisor);
  } else if constexpr (IsComplexType<A>::value) {
    using Part = typename A::value_type;
    const auto factor = static_cast<Part>(scale.factor);
    const auto divisor = static_cast<Part>(scale.divisor);
    return A(value.real() * factor / divisor, value.imag() * factor / divisor);
  } else {
    return value * static_cast<A>(scale.factor) / static_cast<A>(scale.divisor);
  }
}

template <typename T, typename P, typename A, ReduceOp op>
void CombineLoop(const P* partial, const T* own, const Scale& scale, A* to, std::size_t elems) {
  if (scale.is_identity()) {
    for (std::size_t i = 0; i < elems; ++i) {
      to[i] = Apply<op>(static_cast<A>(partial[i]), static_cast<A>(own[i]));
    }
  } else {
    for (std::size_t i = 0; i < elems; ++i) {
      to[i] = Apply<op>(static_cast<A>(partial[i]), Scaled(static_cast<A>(own[i]), scale));
    }
  }
}

template <typename T, typename P, typename A>
void CombineTyped(ReduceOp op, const void* partial, const void* own, const Scale& scale, void* to,
                  std::size_t elems) {
  const auto* p = static_cast<const P*>(partial);
  const auto* o = static_cast<const T*>(own);
  auto* t = static_cast<A*>(to);
  switch (op) {
    case ReduceOp::kSum:
      return CombineLoop<T, P, A, ReduceOp::kSum>(p, o, scale, t, elems);
    case ReduceOp::kMin:
      return CombineLoop<T, P, A, ReduceOp::kMin>(p, o, scale, t, elems);
    case ReduceOp::kMax:
      return CombineLoop<T, P, A, ReduceOp::kMax>(p, o, scale, t, elems);
    case ReduceOp::kProduct:
      return CombineLoop<T, P, A, ReduceOp::kProduct>(p, o, scale, t, elems);
  }
}

template <typename T, typename A>
void WidenTyped(const void* from, const Scale& scale, void* to, std::size_t elems) {
  const auto* f = static_cast<const T*>(from);
  auto* t = static_cast<A*>(to);
  for (std::size_t i = 0; i < elems; ++i) t[i] = Scaled(static_cast<A>(f[i]), scale);
}

template <typename From, typename A, typename T>
void ScaleTyped(const void* from, const Scale& scale, void* to, std::size_t elems) {
  const auto* f = static_cast<const From*>(from);
  auto* t = static_cast<T*>(to);
  if (scale.is_identity()) {
    if constexpr (std::is_same_v<From, T>) {
      if (f != t && elems > 0) std::memcpy(t, f, elems * sizeof(T));
    } else {
      for (std::size_t i = 0; i < elems; ++i) t[i] = static_cast<T>(static_cast<A>(f[i]));
    }
  } else {
    for (std::size_t i = 0; i < elems; ++i) {
      t[i] = static_cast<T>(Scaled(static_cast<A>(f[i]), scale));
    }
  }
}

// to[i] = scale(from[i]) as accumulators.
KERAS_RING_VECTORIZE
void Widen(DType dtype, const void* from, const Scale& scale, void* to, std::size_t elems) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator) \
  case DType::enumerator:                                       \
    return WidenTyped<storage, accumulator>(from, scale, to, elems);
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
}

}  // namespace

const char* ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
  }
  return "unknown";
}

bool IsReducible(DType dtype, ReduceOp op) {
  const bool is_order = op == ReduceOp::kMin || op == ReduceOp::kMax;
  if (dtype == DType::kBool) return is_order;
  return !(IsComplex(dtype) && is_order);
}

KERAS_RING_VECTORIZE
void Combine(DType dtype, ReduceOp op, Format partial_format, const void* partial, const void* own,
             const Scale& scale, void* to, std::size_t elems) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator)                                   \
  case DType::enumerator:                                                                         \
    if (partial_format == Format::kAccumulator) {                                                 \
      return CombineTyped<storage, accumulator, accumulator>(op, partial, own, scale, to, elems); \
    }                                                                                             \
    return CombineTyped<storage, storage, accumulator>(op, partial, own, scale, to, elems);
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
}

KERAS_RING_VECTORIZE
void ScaleTo(DType dtype, Format from_format, const void* from, const Scale& scale, void* to,
             std::size_t elems) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator)                     \
  case DType::enumerator:                                                           \
    if (from_format == Format::kAccumulator) {                                      \
      return ScaleTyped<accumulator, accumulator, storage>(from, scale, to, elems); \
    }                                                                               \
    return ScaleTyped<storage, accumulator, storage>(from, scale, to, elems);
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
}

void ReduceToAccumulators(DType dtype, ReduceOp op, const std::vector<const void*>& sources,
                          const Scale& before, void* to, std::size_t elems) {
  // Two operands at once where that saves a pass.
  std::size_t next = 1;
  if (sources.size() > 1 && before.is_identity()) {
    Combine(dtype, op, Format::kTensor, sources[0], sources[1], before, to, elems);
    next = 2;
  } else {
    Widen(dtype, sources[0], before, to, elems);
  }
  for (; next < sources.size(); ++next) {
    Combine(dtype, op, Format::kAccumulator, to, sources[next], before, to, elems);
  }
}

void Reduce(DType dtype, ReduceOp op, const std::vector<const void*>& sources, const Scale& before,
            const Scale& after, void* to, std::size_t elems) {
  if (AccumulatorDType(dtype) == dtype && after.is_identity()) {
    return ReduceToAccumulators(dtype, op, sources, before, to, elems);
  }
  // A block and its partial result stay in the first-level cache between the passes over them.
  constexpr std::size_t kBlock = 1024;
  alignas(64) char partial[kBlock * sizeof(std::complex<double>)];
  const std::size_t elem_bytes = DTypeBytes(dtype);
  std::vector<const void*> block_sources(sources.size());
  for (std::size_t begin = 0; begin < elems; begin += kBlock) {
    const std::size_t block = std::min(kBlock, elems - begin);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      block_sources[i] = static_cast<const char*>(sources[i]) + begin * elem_bytes;
    }
    ReduceToAccumulators(dtype, op, block_sources, before, partial, block);
    ScaleTo(dtype, Format::kAccumulator, partial, after,
            static_cast<char*>(to) + begin * elem_bytes, block);
  }
}

}  // namespace keras_ring
