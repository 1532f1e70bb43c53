#include "reduce/reduce.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check.h"
#include "dtypes.h"

namespace keras_ring {
namespace {

using check::Note;

constexpr std::size_t kElems = 1037;  // not a multiple of any vector's length

// Elements that reach all corners of a type: multiples of a large odd number wrap in every integer.
template <typename T>
T Element(std::size_t i, std::int64_t salt) {
  const auto mixed = static_cast<std::int64_t>((i + 1) * 0x9e3779b97f4a7c15u + salt);
  return FromInt<T>(std::is_integral_v<T> ? mixed : mixed % 1000);
}

template <typename T, typename A>
void CheckCombine(DType dtype, ReduceOp op, Format format, bool in_place) {
  std::vector<char> own = Bytes(kElems, dtype);
  std::vector<char> partial(kElems * (format == Format::kTensor ? sizeof(T) : sizeof(A)));
  std::vector<char> to(kElems * sizeof(A));
  std::vector<char> wanted(kElems * sizeof(A));
  for (std::size_t i = 0; i < kElems; ++i) {
    const T a = Element<T>(i, 7);
    const T b = Element<T>(i, 1234567);
    if (format == Format::kTensor) {
      Store(&partial, i, a);
    } else {
      Store(&partial, i, static_cast<A>(a));
    }
    Store(&own, i, b);
    Store(&wanted, i, Reference(op, static_cast<A>(a), static_cast<A>(b)));
  }
  std::vector<char>& result = in_place ? partial : to;
  Combine(dtype, op, format, partial.data(), own.data(), Scale{}, result.data(), kElems);
  for (std::size_t i = 0; i < kElems; ++i) {
    CHECK_EQ(Load<A>(result, i), Load<A>(wanted, i));
  }
}

TEST("combine: every dtype, operation and format as NumPy, integers wrap around") {
  for (const DType dtype : kAllDTypes) {
    for (const ReduceOp op : kAllOps) {
      if (!IsReducible(dtype, op)) continue;
      const Note note(DTypeName(dtype), " ", ReduceOpName(op));
      WithTypes(dtype, [&](auto storage, auto accumulator) {
        using T = decltype(storage);
        using A = decltype(accumulator);
        CheckCombine<T, A>(dtype, op, Format::kTensor, /*in_place=*/false);
        CheckCombine<T, A>(dtype, op, Format::kAccumulator, /*in_place=*/false);
        CheckCombine<T, A>(dtype, op, Format::kAccumulator, /*in_place=*/true);
      });
    }
  }
}

TEST("combine: bool takes min and max only, complex sum and product only") {
  CHECK(IsReducible(DType::kBool, ReduceOp::kMin));
  CHECK(IsReducible(DType::kBool, ReduceOp::kMax));
  CHECK(!IsReducible(DType::kBool, ReduceOp::kSum));
  CHECK(!IsReducible(DType::kBool, ReduceOp::kProduct));
  for (const DType dtype : {DType::kComplex64, DType::kComplex128}) {
    CHECK(IsReducible(dtype, ReduceOp::kSum));
    CHECK(IsReducible(dtype, ReduceOp::kProduct));
    CHECK(!IsReducible(dtype, ReduceOp::kMin));
    CHECK(!IsReducible(dtype, ReduceOp::kMax));
  }
  for (const ReduceOp op : kAllOps) CHECK(IsReducible(DType::kBfloat16, op));
}

template <typename T>
void CheckNaN(DType dtype) {
  using A = std::conditional_t<sizeof(T) == 2, float, T>;
  const auto nan = static_cast<T>(std::numeric_limits<A>::quiet_NaN());
  for (const ReduceOp op : kAllOps) {
    const Note note(DTypeName(dtype), " ", ReduceOpName(op));
    const T partial[] = {nan, static_cast<T>(A{1}), nan};
    const T own[] = {static_cast<T>(A{1}), nan, nan};
    A to[3] = {};
    Combine(dtype, op, Format::kTensor, partial, own, Scale{}, to, 3);
    for (const A value : to) CHECK(std::isnan(value));
  }
}

TEST("combine: a NaN on either side wins in every operation") {
  CheckNaN<float>(DType::kFloat32);
  CheckNaN<double>(DType::kFloat64);
  CheckNaN<Float16>(DType::kFloat16);
  CheckNaN<Bfloat16>(DType::kBfloat16);
}

TEST("combine: infinities add up as in IEEE") {
  const float infinity = std::numeric_limits<float>::infinity();
  const float partial[] = {infinity, infinity};
  const float own[] = {1.0f, -infinity};
  float to[2] = {};
  Combine(DType::kFloat32, ReduceOp::kSum, Format::kTensor, partial, own, Scale{}, to, 2);
  CHECK_EQ(to[0], infinity);
  CHECK(std::isnan(to[1]));
}

TEST("combine: 16-bit floats are kept in float32 between two additions") {
  // 2048 + 1 is no float16, and 256 + 1 no bfloat16.
  const Float16 own(1.0f);
  float partial = 2048.0f;
  for (int i = 0; i < 2; ++i) {
    Combine(DType::kFloat16, ReduceOp::kSum, Format::kAccumulator, &partial, &own, Scale{},
            &partial, 1);
  }
  CHECK_EQ(partial, 2050.0f);
  const Bfloat16 brain(1.0f);
  partial = 256.0f;
  for (int i = 0; i < 2; ++i) {
    Combine(DType::kBfloat16, ReduceOp::kSum, Format::kAccumulator, &partial, &brain, Scale{},
            &partial, 1);
  }
  CHECK_EQ(partial, 258.0f);
}

TEST("combine: the own operand is scaled, the partial result is not") {
  const Scale third_of_double{2.0, 3};
  const double partial = 10;
  const double own = 6;
  double to = 0;
  Combine(DType::kFloat64, ReduceOp::kSum, Format::kTensor, &partial, &own, third_of_double, &to,
          1);
  CHECK_EQ(to, 14.0);
}

TEST("combine and scale: no elements, no access") {
  Combine(DType::kFloat32, ReduceOp::kSum, Format::kTensor, nullptr, nullptr, Scale{}, nullptr, 0);
  ScaleTo(DType::kFloat32, Format::kTensor, nullptr, Scale{}, nullptr, 0);
  ScaleTo(DType::kFloat16, Format::kAccumulator, nullptr, Scale{2.0, 1}, nullptr, 0);
}

TEST("scale: the identity copies every dtype to the bit") {
  for (const DType dtype : kAllDTypes) {
    if (dtype == DType::kBool) continue;  // has no other bits than 0 and 1
    const Note note(DTypeName(dtype));
    std::vector<char> from = Bytes(kElems, dtype);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 37 + i / 256);
    std::vector<char> to = Bytes(kElems, dtype);
    ScaleTo(dtype, Format::kTensor, from.data(), Scale{}, to.data(), kElems);
    CHECK(to == from);
    ScaleTo(dtype, Format::kTensor, from.data(), Scale{}, from.data(), kElems);
    CHECK(to == from);
  }
}

TEST("scale: accumulators become tensor elements, in place where the formats agree") {
  for (const DType dtype : kAllDTypes) {
    const Note note(DTypeName(dtype));
    WithTypes(dtype, [&](auto storage, auto accumulator) {
      using T = decltype(storage);
      using A = decltype(accumulator);
      std::vector<char> from(kElems * sizeof(A));
      std::vector<char> wanted(kElems * sizeof(T));
      for (std::size_t i = 0; i < kElems; ++i) {
        Store(&from, i, FromInt<A>(static_cast<std::int64_t>(i)));
        Store(&wanted, i, static_cast<T>(FromInt<A>(static_cast<std::int64_t>(i))));
      }
      std::vector<char> to(kElems * sizeof(T));
      ScaleTo(dtype, Format::kAccumulator, from.data(), Scale{}, to.data(), kElems);
      CHECK(to == wanted);
      if (sizeof(A) != sizeof(T)) return;
      ScaleTo(dtype, Format::kAccumulator, from.data(), Scale{}, from.data(), kElems);
      CHECK(from == wanted);
    });
  }
}

template <typename T>
void CheckFloorDivision(DType dtype, std::int64_t lowest) {
  for (const std::int64_t divisor : {1, 2, 3, 5, 16}) {
    for (std::int64_t value = lowest; value <= 40; ++value) {
      const auto from = static_cast<T>(value);
      T to{};
      ScaleTo(dtype, Format::kTensor, &from, Scale{1.0, divisor}, &to, 1);
      const Note note(DTypeName(dtype), " ", value, " // ", divisor);
      CHECK_EQ(static_cast<std::int64_t>(to),
               static_cast<std::int64_t>(
                   std::floor(static_cast<double>(value) / static_cast<double>(divisor))));
    }
  }
}

TEST("scale: integers are divided with floor, as Python's //") {
  CheckFloorDivision<std::int8_t>(DType::kInt8, -40);
  CheckFloorDivision<std::int16_t>(DType::kInt16, -40);
  CheckFloorDivision<std::int32_t>(DType::kInt32, -40);
  CheckFloorDivision<std::int64_t>(DType::kInt64, -40);
  CheckFloorDivision<std::uint8_t>(DType::kUint8, 0);
  CheckFloorDivision<std::uint16_t>(DType::kUint16, 0);
  CheckFloorDivision<std::uint32_t>(DType::kUint32, 0);
  CheckFloorDivision<std::uint64_t>(DType::kUint64, 0);
}

TEST("scale: the extreme integers are divided without a detour over float64") {
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  std::int64_t signed_result = 0;
  ScaleTo(DType::kInt64, Format::kTensor, &least, Scale{1.0, 3}, &signed_result, 1);
  CHECK_EQ(signed_result, -3074457345618258603);
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t result = 0;
  ScaleTo(DType::kUint64, Format::kTensor, &most, Scale{1.0, 3}, &result, 1);
  CHECK_EQ(result, std::uint64_t{6148914691236517205});
}

TEST("scale: a factor on integers is applied in float64 and cut towards zero") {
  const std::int32_t from[] = {7, -7, 1000001};
  std::int32_t to[3] = {};
  ScaleTo(DType::kInt32, Format::kTensor, from, Scale{0.5, 1}, to, 3);
  CHECK_EQ((std::vector<std::int32_t>(to, to + 3)), (std::vector<std::int32_t>{3, -3, 500000}));
}

TEST("scale: floats and complex numbers take factor and divisor") {
  const Scale scale{0.5, 4};
  const double from = 24;
  double to = 0;
  ScaleTo(DType::kFloat64, Format::kTensor, &from, scale, &to, 1);
  CHECK_EQ(to, 3.0);
  const Float16 half(24.0f);
  Float16 half_result;
  ScaleTo(DType::kFloat16, Format::kTensor, &half, scale, &half_result, 1);
  CHECK_EQ(static_cast<float>(half_result), 3.0f);
  const std::complex<float> number(24, -8);
  std::complex<float> result;
  ScaleTo(DType::kComplex64, Format::kTensor, &number, scale, &result, 1);
  CHECK_EQ(result, std::complex<float>(3, -1));
}

TEST("scale: the sum of two large float16 values divides before it overflows") {
  const float sum = 120000.0f;  // of two values of 60000, the largest float16 is 65504
  Float16 mean;
  ScaleTo(DType::kFloat16, Format::kAccumulator, &sum, Scale{1.0, 2}, &mean, 1);
  CHECK_EQ(static_cast<float>(mean), 60000.0f);
}

}  // namespace
}  // namespace keras_ring
