// The one table of element types: name, storage type, type in which sums are kept.
// Everything that depends on a type (sizes, names, kernels, TensorFlow's numbers) is made from it.
#ifndef KERAS_RING_CORE_DTYPE_H_
#define KERAS_RING_CORE_DTYPE_H_

#include <complex>
#include <cstddef>
#include <cstdint>

#include "core/float16.h"

namespace keras_ring {

// X(enumerator, name, storage, accumulator). The order is part of the control messages.
#define KERAS_RING_DTYPES(X)                                           \
  X(kBool, "bool", bool, bool)                                         \
  X(kInt8, "int8", std::int8_t, std::int8_t)                           \
  X(kInt16, "int16", std::int16_t, std::int16_t)                       \
  X(kInt32, "int32", std::int32_t, std::int32_t)                       \
  X(kInt64, "int64", std::int64_t, std::int64_t)                       \
  X(kUint8, "uint8", std::uint8_t, std::uint8_t)                       \
  X(kUint16, "uint16", std::uint16_t, std::uint16_t)                   \
  X(kUint32, "uint32", std::uint32_t, std::uint32_t)                   \
  X(kUint64, "uint64", std::uint64_t, std::uint64_t)                   \
  X(kFloat16, "float16", ::keras_ring::Float16, float)                 \
  X(kBfloat16, "bfloat16", ::keras_ring::Bfloat16, float)              \
  X(kFloat32, "float32", float, float)                                 \
  X(kFloat64, "float64", double, double)                               \
  X(kComplex64, "complex64", std::complex<float>, std::complex<float>) \
  X(kComplex128, "complex128", std::complex<double>, std::complex<double>)

enum class DType : std::uint8_t {
#define KERAS_RING_ENUMERATOR(enumerator, name, storage, accumulator) enumerator,
  KERAS_RING_DTYPES(KERAS_RING_ENUMERATOR)
#undef KERAS_RING_ENUMERATOR
};

inline constexpr DType kAllDTypes[] = {
#define KERAS_RING_ENUMERATOR(enumerator, name, storage, accumulator) DType::enumerator,
    KERAS_RING_DTYPES(KERAS_RING_ENUMERATOR)
#undef KERAS_RING_ENUMERATOR
};

// Bytes of one element in a tensor.
constexpr std::size_t DTypeBytes(DType dtype) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator) \
  case DType::enumerator:                                       \
    return sizeof(storage);
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
  return 0;
}

// Bytes of one element of a partial result: 16-bit floats are summed in float32.
constexpr std::size_t AccumulatorBytes(DType dtype) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator) \
  case DType::enumerator:                                       \
    return sizeof(accumulator);
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
  return 0;
}

// The type of a partial result.
constexpr DType AccumulatorDType(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 ? DType::kFloat32 : dtype;
}

constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator) \
  case DType::enumerator:                                       \
    return name;
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
  return "unknown";
}

constexpr bool IsComplex(DType dtype) {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

constexpr bool IsFloating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

}  // namespace keras_ring

#endif  // KERAS_RING_CORE_DTYPE_H_
