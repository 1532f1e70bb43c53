#include "core/float16.h"

#include <cmath>
#include <limits>

#include "check.h"

namespace keras_ring {
namespace {

using check::Note;

constexpr std::uint32_t kNumBits = 1u << 16;

// A 16-bit float by its definition: sign, exponent and mantissa of the given width.
double Defined(std::uint16_t bits, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

template <typename Half>
Half OfBits(std::uint32_t bits) {
  Half half;
  half.bits = static_cast<std::uint16_t>(bits);
  return half;
}

template <typename Half>
void CheckToFloat(int mantissa_bits) {
  for (std::uint32_t bits = 0; bits < kNumBits; ++bits) {
    const Note note("bits ", bits);
    const auto value = static_cast<float>(OfBits<Half>(bits));
    const double wanted = Defined(static_cast<std::uint16_t>(bits), mantissa_bits);
    if (std::isnan(wanted)) {
      CHECK(std::isnan(value));
    } else {
      CHECK_EQ(static_cast<double>(value), wanted);
    }
    CHECK_EQ(std::signbit(value), bits >= 0x8000u);
  }
}

template <typename Half>
void CheckRoundTrip() {
  for (std::uint32_t bits = 0; bits < kNumBits; ++bits) {
    const Note note("bits ", bits);
    const auto value = static_cast<float>(OfBits<Half>(bits));
    if (std::isnan(value)) {
      CHECK(std::isnan(static_cast<float>(Half(value))));
    } else {
      CHECK_EQ(std::uint32_t{Half(value).bits}, bits);
    }
  }
}

// Between two neighbours the nearer one wins, and of two equally near ones the even one. Infinity
// stands where the next finite number would be.
template <typename Half>
void CheckRounding(std::uint32_t infinity, int mantissa_bits) {
  for (const std::uint32_t sign : {0u, 0x8000u}) {
    for (std::uint32_t low = 0; low < infinity; ++low) {
      const Note note("bits ", low | sign);
      const double below = Defined(static_cast<std::uint16_t>(low), mantissa_bits);
      const double above =
          low + 1 == infinity
              ? below + (below - Defined(static_cast<std::uint16_t>(low - 1), mantissa_bits))
              : Defined(static_cast<std::uint16_t>(low + 1), mantissa_bits);
      const double middle = (below + above) / 2;
      const auto round = [sign](double magnitude) {
        const auto value = static_cast<float>(magnitude);
        return std::uint32_t{Half(sign != 0 ? -value : value).bits};
      };
      const auto exact = static_cast<float>(middle);
      if (static_cast<double>(exact) == middle) {
        CHECK_EQ(round(middle), (low % 2 == 0 ? low : low + 1) | sign);
      }
      CHECK_EQ(round(std::nextafter(exact, 0.0f)), low | sign);
      CHECK_EQ(round(std::nextafter(exact, std::numeric_limits<float>::max())), (low + 1) | sign);
    }
  }
}

TEST("float16: all values are those of IEEE binary16") { CheckToFloat<Float16>(10); }
TEST("bfloat16: all values are those of a binary32's upper half") { CheckToFloat<Bfloat16>(7); }
TEST("float16: all values survive float32 and back") { CheckRoundTrip<Float16>(); }
TEST("bfloat16: all values survive float32 and back") { CheckRoundTrip<Bfloat16>(); }
TEST("float16: rounds to nearest, ties to even, overflows to infinity") {
  CheckRounding<Float16>(0x7c00, 10);
}
TEST("bfloat16: rounds to nearest, ties to even, overflows to infinity") {
  // The middle above the largest number is no float32; the neighbours are checked below.
  CheckRounding<Bfloat16>(0x7f7f, 7);
}

TEST("bfloat16: the largest float32 overflows to infinity, the largest bfloat16 does not") {
  CHECK_EQ(std::uint32_t{Bfloat16(std::numeric_limits<float>::max()).bits}, 0x7f80u);
  CHECK_EQ(std::uint32_t{Bfloat16(-std::numeric_limits<float>::max()).bits}, 0xff80u);
  CHECK_EQ(std::uint32_t{Bfloat16(internal::FloatOf(0x7f7f7fffu)).bits}, 0x7f7fu);
  CHECK_EQ(std::uint32_t{Bfloat16(internal::FloatOf(0x7f7f8000u)).bits}, 0x7f80u);
}

TEST("both: subnormal float32, huge float32, infinity and NaN") {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float least = std::numeric_limits<float>::denorm_min();
  CHECK_EQ(std::uint32_t{Float16(-least).bits}, 0x8000u);
  CHECK_EQ(std::uint32_t{Float16(1e30f).bits}, 0x7c00u);
  CHECK_EQ(std::uint32_t{Float16(-infinity).bits}, 0xfc00u);
  CHECK_EQ(std::uint32_t{Bfloat16(least).bits}, 0u);
  CHECK_EQ(std::uint32_t{Bfloat16(-infinity).bits}, 0xff80u);
  CHECK(std::isnan(static_cast<float>(Float16(nan))));
  CHECK(std::isnan(static_cast<float>(Bfloat16(-nan))));
  // All of this NaN's payload is in the half that is cut off.
  CHECK(std::isnan(static_cast<float>(Float16(internal::FloatOf(0x7f800001u)))));
  CHECK(std::isnan(static_cast<float>(Bfloat16(internal::FloatOf(0x7f800001u)))));
}

}  // namespace
}  // namespace keras_ring
