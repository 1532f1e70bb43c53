// Typed access to tensors whose dtype is a parameter of the test.
#ifndef KERAS_RING_TESTS_NATIVE_DTYPES_H_
#define KERAS_RING_TESTS_NATIVE_DTYPES_H_

#include <algorithm>
#include <complex>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "check.h"
#include "core/dtype.h"
#include "reduce/reduce.h"

// Calls `body(storage{}, accumulator{})` with values of the dtype's C++ types.
template <typename Body>
void WithTypes(keras_ring::DType dtype, const Body& body) {
  switch (dtype) {
#define TEST_CASE(enumerator, name, storage, accumulator) \
  case keras_ring::DType::enumerator:                     \
    return body(storage{}, accumulator{});
    KERAS_RING_DTYPES(TEST_CASE)
#undef TEST_CASE
  }
}

inline const std::vector<keras_ring::ReduceOp> kAllOps = {
    keras_ring::ReduceOp::kSum, keras_ring::ReduceOp::kMin, keras_ring::ReduceOp::kMax,
    keras_ring::ReduceOp::kProduct};

template <typename T>
struct IsComplexType : std::false_type {};
template <typename T>
struct IsComplexType<std::complex<T>> : std::true_type {};

// The operation as NumPy defines it, on accumulators.
template <typename A>
A Reference(keras_ring::ReduceOp op, A a, A b) {
  if constexpr (std::is_same_v<A, bool>) {
    return op == keras_ring::ReduceOp::kMin ? a && b : a || b;
  } else if constexpr (IsComplexType<A>::value) {
    if (op == keras_ring::ReduceOp::kSum) return a + b;
    return A(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
  } else {
    if (op == keras_ring::ReduceOp::kMin) return std::min(a, b);
    if (op == keras_ring::ReduceOp::kMax) return std::max(a, b);
    if constexpr (std::is_integral_v<A>) {
      const auto wide_a = static_cast<__int128>(a);
      const auto wide_b = static_cast<__int128>(b);
      if (op == keras_ring::ReduceOp::kSum) return static_cast<A>(wide_a + wide_b);
      return static_cast<A>(static_cast<unsigned __int128>(wide_a) *
                            static_cast<unsigned __int128>(wide_b));
    } else {
      return op == keras_ring::ReduceOp::kSum ? a + b : a * b;
    }
  }
}

// A tensor element from an integer; integers wrap.
template <typename T>
T FromInt(std::int64_t value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value % 3 == 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(value));
  } else if constexpr (IsComplexType<T>::value) {
    using Part = typename T::value_type;
    return T(static_cast<Part>(value), static_cast<Part>(1 - value));
  } else {
    return static_cast<T>(static_cast<float>(value));
  }
}

// std::vector<bool> has no memory to point to.
inline std::vector<char> Bytes(std::size_t elems, keras_ring::DType dtype) {
  return std::vector<char>(elems * keras_ring::DTypeBytes(dtype));
}

template <typename T>
T Load(const std::vector<char>& bytes, std::size_t element) {
  T value{};
  std::memcpy(static_cast<void*>(&value), bytes.data() + element * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Store(std::vector<char>* bytes, std::size_t element, const T& value) {
  std::memcpy(bytes->data() + element * sizeof(T), &value, sizeof(T));
}

#endif  // KERAS_RING_TESTS_NATIVE_DTYPES_H_
