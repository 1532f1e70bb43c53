#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "dtypes.h"
#include "reduce/level.h"
#include "reduce/reduce.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace keras_ring {
namespace {

using check::Note;

constexpr std::uint32_t kNumBits = 1u << 16;

// Calls `body` with every level of this processor in force.
template <typename Body>
void AtEveryLevel(const Body& body) {
  struct Restore {
    ~Restore() { ForceLevel(SupportedLevels().back()); }
  } const restore;
  for (const Level level : SupportedLevels()) {
    const Note note("level ", LevelName(level));
    ForceLevel(level);
    CHECK_EQ(CurrentLevel(), level);
    body();
  }
}

TEST("levels: the portable one is always there, and the best is taken") {
  CHECK_EQ(SupportedLevels().front(), Level::kPortable);
  CHECK_EQ(CurrentLevel(), SupportedLevels().back());
}

// All 16-bit floats, what lies next to them and halfway between them, and bits by chance.
template <typename Half>
std::vector<float> ManyFloats() {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < kNumBits; ++bits) {
    Half half;
    half.bits = static_cast<std::uint16_t>(bits);
    Half next;
    next.bits = static_cast<std::uint16_t>(bits + 1);
    const auto value = static_cast<float>(half);
    const float middle = value / 2 + static_cast<float>(next) / 2;
    for (const float one : {value, middle}) {
      values.push_back(one);
      values.push_back(std::nextafter(one, std::numeric_limits<float>::infinity()));
      values.push_back(std::nextafter(one, -std::numeric_limits<float>::infinity()));
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 1 << 19; ++i) {
    values.push_back(internal::FloatOf(static_cast<std::uint32_t>(random())));
  }
  // NaNs of both signs, quiet or not, with payload in either half; the least and the largest.
  for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7f801fffu, 0x7f802000u, 0x7fffffffu,
                                   1u, 0x007fffffu, 0x7f7fffffu, 0x33000000u, 0x33000001u}) {
    values.push_back(internal::FloatOf(bits));
    values.push_back(internal::FloatOf(bits | 0x80000000u));
  }
  return values;
}

template <typename Half>
void CheckNarrowing(DType dtype) {
  const std::vector<float> values = ManyFloats<Half>();
  AtEveryLevel([&] {
    std::vector<Half> got(values.size());
    ScaleTo(dtype, Format::kAccumulator, values.data(), Scale{}, got.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (got[i].bits == Half(values[i]).bits) continue;
      const Note note("float32 bits ", internal::BitsOf(values[i]));
      CHECK_EQ(got[i].bits, Half(values[i]).bits);
    }
  });
}

template <typename Half>
void CheckWidening(DType dtype) {
  std::vector<Half> halves(kNumBits);
  for (std::uint32_t bits = 0; bits < kNumBits; ++bits) {
    halves[bits].bits = static_cast<std::uint16_t>(bits);
  }
  AtEveryLevel([&] {
    std::vector<float> got(kNumBits);
    Widen(dtype, halves.data(), Scale{}, got.data(), kNumBits);
    for (std::uint32_t bits = 0; bits < kNumBits; ++bits) {
      const Note note("16-bit float ", bits);
      CHECK_EQ(internal::BitsOf(got[bits]), internal::BitsOf(static_cast<float>(halves[bits])));
    }
  });
}

TEST("levels: float32 becomes float16 with the same bits, NaN and subnormals included") {
  CheckNarrowing<Float16>(DType::kFloat16);
}
TEST("levels: float32 becomes bfloat16 with the same bits, NaN and subnormals included") {
  CheckNarrowing<Bfloat16>(DType::kBfloat16);
}
TEST("levels: every float16 and bfloat16 becomes float32 with the same bits") {
  CheckWidening<Float16>(DType::kFloat16);
  CheckWidening<Bfloat16>(DType::kBfloat16);
}

// Bits by chance, and more corners than chance would bring.
std::vector<char> RandomTensor(DType dtype, std::size_t elems, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> bytes = Bytes(elems, dtype);
  for (char& byte : bytes) byte = static_cast<char>(random());
  WithTypes(dtype, [&](auto storage, auto) {
    using T = decltype(storage);
    for (std::size_t i = 0; i < elems; ++i) {
      if constexpr (std::is_same_v<T, bool>) {
        Store(&bytes, i, random() % 2 == 0);
      } else if (random() % 4 == 0) {
        Store(&bytes, i, FromInt<T>(static_cast<std::int64_t>(random() % 5) - 2));
      }
    }
  });
  return bytes;
}

// The same bits, but that a NaN's are the processor's.
template <typename T>
bool IsSame(const T& a, const T& b) {
  if constexpr (IsComplexType<T>::value) {
    return IsSame(a.real(), b.real()) && IsSame(a.imag(), b.imag());
  } else if constexpr (std::is_floating_point_v<T>) {
    return (a != a && b != b) || std::memcmp(&a, &b, sizeof a) == 0;
  } else if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>) {
    return IsSame(static_cast<float>(a), static_cast<float>(b));
  } else {
    return a == b;
  }
}

template <typename T>
void CheckSame(const std::vector<char>& got, const std::vector<char>& wanted) {
  CHECK_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size() / sizeof(T); ++i) {
    if (IsSame(Load<T>(got, i), Load<T>(wanted, i))) continue;
    const Note note("element ", i);
    CHECK_EQ(got, wanted);
  }
}

// Runs all there is on a dtype; the results, one after the other.
template <typename T, typename A>
std::vector<std::vector<char>> RunAll(DType dtype, std::size_t elems) {
  const std::vector<char> a = RandomTensor(dtype, elems, 1);
  const std::vector<char> b = RandomTensor(dtype, elems, 2);
  const std::vector<char> wide = RandomTensor(AccumulatorDType(dtype), elems, 3);
  std::vector<std::vector<char>> results;
  const auto result = [&](std::size_t bytes) {
    return static_cast<void*>(results.emplace_back(bytes * elems).data());
  };
  for (const Scale& scale :
       {Scale{}, Scale{1.0, 4}, Scale{1.0, 3}, Scale{0.3, 1}, Scale{-2.5, 8}, Scale{0.7, 6}}) {
    for (const ReduceOp op : kAllOps) {
      if (!IsReducible(dtype, op)) continue;
      Combine(dtype, op, Format::kTensor, a.data(), b.data(), scale, result(sizeof(A)), elems);
      Combine(dtype, op, Format::kAccumulator, wide.data(), b.data(), scale, result(sizeof(A)),
              elems);
    }
    Widen(dtype, a.data(), scale, result(sizeof(A)), elems);
  }
  return results;
}

template <typename T>
std::vector<std::vector<char>> ScaleAll(DType dtype, std::size_t elems) {
  const std::vector<char> tensor = RandomTensor(dtype, elems, 1);
  const std::vector<char> other = RandomTensor(dtype, elems, 2);
  const std::vector<char> wide = RandomTensor(AccumulatorDType(dtype), elems, 3);
  std::vector<std::vector<char>> results;
  for (const Scale& scale :
       {Scale{}, Scale{1.0, 4}, Scale{1.0, 3}, Scale{0.3, 1}, Scale{-2.5, 8}, Scale{0.7, 6}}) {
    for (const Format format : {Format::kTensor, Format::kAccumulator}) {
      std::vector<char>& to = results.emplace_back(sizeof(T) * elems);
      ScaleTo(dtype, format, (format == Format::kTensor ? tensor : wide).data(), scale, to.data(),
              elems);
    }
    const ReduceOp op = IsReducible(dtype, ReduceOp::kSum) ? ReduceOp::kSum : ReduceOp::kMax;
    std::vector<char>& to = results.emplace_back(sizeof(T) * elems);
    Reduce(dtype, op, {tensor.data(), other.data(), tensor.data()}, Scale{}, scale, to.data(),
           elems);
  }
  return results;
}

TEST("levels: all arithmetic of all dtypes gives the same bits, at every length") {
  for (const DType dtype : kAllDTypes) {
    // Around the number of lanes of every level; the last has many turns of the loops and a rest.
    for (const std::size_t elems : {1, 3, 4, 7, 8, 15, 16, 17, 33, 1031}) {
      WithTypes(dtype, [&](auto storage, auto accumulator) {
        using T = decltype(storage);
        using A = decltype(accumulator);
        std::vector<std::vector<char>> sums;
        std::vector<std::vector<char>> scaled;
        AtEveryLevel([&] {
          const Note note(DTypeName(dtype), ", ", elems, " elements");
          const auto its_sums = RunAll<T, A>(dtype, elems);
          const auto its_scaled = ScaleAll<T>(dtype, elems);
          if (sums.empty()) {
            sums = its_sums;
            scaled = its_scaled;
          }
          for (std::size_t i = 0; i < sums.size(); ++i) CheckSame<A>(its_sums[i], sums[i]);
          for (std::size_t i = 0; i < scaled.size(); ++i) CheckSame<T>(its_scaled[i], scaled[i]);
        });
      });
    }
  }
}

// A mode of the processor in which nothing here must compute, for as long as it lives.
class OtherMode {
 public:
  OtherMode() {
    std::fegetenv(&before_);
    std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
    constexpr unsigned kFlushAndDenormalsAreZeros = 0x8040;
    _mm_setcsr(_mm_getcsr() | kFlushAndDenormalsAreZeros);
#elif defined(__aarch64__)
    std::uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    asm volatile("msr fpcr, %0" : : "r"(mode | (1u << 24)));
#endif
  }
  ~OtherMode() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

TEST("levels: the bits do not depend on the calling thread's rounding or flushing of subnormals") {
  // Subnormal sums, quotients and float16, and sums that are rounded.
  const std::vector<float> a = {1e-40f, 3e-39f, 1.0f, 1e-45f, 1e-5f, 0.1f, -1e-40f, 6e-8f};
  const std::vector<float> b = {2e-40f, 1e-38f, 1e-8f, 1e-45f, 2e-7f, 0.2f, -1e-45f, 3e-8f};
  const std::vector<Float16> halves = {Float16(6e-8f), Float16(1e-5f), Float16(1.0f)};
  const auto run = [&] {
    std::vector<float> sums(3 * a.size());
    Combine(DType::kFloat32, ReduceOp::kSum, Format::kTensor, a.data(), b.data(), Scale{},
            sums.data(), a.size());
    Reduce(DType::kFloat32, ReduceOp::kSum, {a.data(), b.data()}, Scale{}, Scale{1.0, 3},
           sums.data() + a.size(), a.size());
    Widen(DType::kFloat16, halves.data(), Scale{}, sums.data() + 2 * a.size(), halves.size());
    std::vector<Float16> narrow(a.size());
    ScaleTo(DType::kFloat16, Format::kAccumulator, a.data(), Scale{}, narrow.data(), a.size());
    std::vector<std::uint32_t> bits;
    for (const float sum : sums) bits.push_back(internal::BitsOf(sum));
    for (const Float16 half : narrow) bits.push_back(half.bits);
    return bits;
  };
  AtEveryLevel([&] {
    const auto wanted = run();
    std::vector<std::uint32_t> got;
    {
      const OtherMode mode;
      got = run();
      CHECK_EQ(std::fegetround(), FE_UPWARD);  // the caller's mode is left as it was
    }
    CHECK_EQ(got, wanted);
    CHECK_EQ(internal::FloatOf(wanted[3]), 3e-45f);  // nothing was flushed
  });
}

TEST("levels: a mean over a power of two is the quotient to the bit, subnormals included") {
  std::vector<float> values = ManyFloats<Float16>();
  for (std::uint32_t bits = 0; bits < 4096; ++bits) values.push_back(internal::FloatOf(bits));
  AtEveryLevel([&] {
    for (const std::int64_t divisor : {2, 4, 64, 1 << 20}) {
      const Note note("divisor ", divisor);
      std::vector<float> got(values.size());
      ScaleTo(DType::kFloat32, Format::kTensor, values.data(), Scale{1.0, divisor}, got.data(),
              values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        CHECK(IsSame(got[i], values[i] / static_cast<float>(divisor)));
      }
    }
  });
}

template <typename T>
void CheckFloor(DType dtype) {
  std::vector<T> values;
  for (std::int64_t i = 0; i < 1 << 16; ++i) values.push_back(static_cast<T>(i * 65537 + i / 256));
  for (const int from_end : {0, 1, 2, 3}) {
    values.push_back(static_cast<T>(std::numeric_limits<T>::max() - from_end));
    values.push_back(static_cast<T>(std::numeric_limits<T>::min() + from_end));
  }
  for (const std::int64_t divisor :
       {std::int64_t{2}, std::int64_t{3}, std::int64_t{7}, std::int64_t{8}, std::int64_t{1000},
        std::int64_t{65535}, std::int64_t{65537}, std::int64_t{1} << 31,
        std::numeric_limits<std::int64_t>::max()}) {
    const Note note(DTypeName(dtype), " // ", divisor);
    std::vector<T> got(values.size());
    ScaleTo(dtype, Format::kTensor, values.data(), Scale{1.0, divisor}, got.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto value = static_cast<__int128>(values[i]);
      const auto down = value < 0 && value % divisor != 0 ? 1 : 0;
      CHECK_EQ(got[i], static_cast<T>(value / divisor - down));
    }
  }
}

TEST("levels: integers are divided with floor at both ends of their range, by any divisor") {
  AtEveryLevel([] {
    CheckFloor<std::int8_t>(DType::kInt8);
    CheckFloor<std::int16_t>(DType::kInt16);
    CheckFloor<std::int32_t>(DType::kInt32);
    CheckFloor<std::int64_t>(DType::kInt64);
    CheckFloor<std::uint8_t>(DType::kUint8);
    CheckFloor<std::uint16_t>(DType::kUint16);
    CheckFloor<std::uint32_t>(DType::kUint32);
    CheckFloor<std::uint64_t>(DType::kUint64);
  });
}

TEST("levels: a factor that leads out of an integer's range gives the end of the range") {
  AtEveryLevel([] {
    const std::int8_t from[] = {100, -100, 7};
    std::int8_t to[3] = {};
    ScaleTo(DType::kInt8, Format::kTensor, from, Scale{2.0, 1}, to, 3);
    CHECK_EQ((std::vector<std::int8_t>(to, to + 3)), (std::vector<std::int8_t>{127, -128, 14}));
    const std::uint64_t large = std::numeric_limits<std::uint64_t>::max() / 2;
    std::uint64_t larger = 0;
    ScaleTo(DType::kUint64, Format::kTensor, &large, Scale{3.0, 1}, &larger, 1);
    CHECK_EQ(larger, std::numeric_limits<std::uint64_t>::max());
    const std::uint32_t some = 5;
    std::uint32_t none = 1;
    ScaleTo(DType::kUint32, Format::kTensor, &some, Scale{-1.0, 1}, &none, 1);
    CHECK_EQ(none, 0u);
  });
}

}  // namespace
}  // namespace keras_ring
