// Storage types of the two 16-bit floats and their conversions, free of branches so that the
// compiler vectorises loops over them. There is no arithmetic here: sums are kept in float32.
#ifndef KERAS_RING_CORE_FLOAT16_H_
#define KERAS_RING_CORE_FLOAT16_H_

#include <cstdint>
#include <cstring>

namespace keras_ring {

namespace internal {

inline std::uint32_t BitsOf(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float FloatOf(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// IEEE binary16 to binary32. Multiplying by 2^112 moves the exponent's bias and makes subnormals
// normal in one step; what lands at or above 2^16 was infinity or NaN. As in hardware, a NaN keeps
// its payload and gets quiet.
inline float HalfBitsToFloat(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const float scaled =
      FloatOf(static_cast<std::uint32_t>(half & 0x7fffu) << 13) * FloatOf(0x77800000u);
  std::uint32_t bits = BitsOf(scaled);
  bits |= scaled >= 65536.0f ? 0x7f800000u : 0u;
  bits |= (half & 0x7fffu) > 0x7c00u ? 0x00400000u : 0u;
  return FloatOf(bits | sign);
}

// Rounds to nearest, ties to even; overflow gives infinity, a NaN keeps what fits of its
// payload and gets quiet.
inline std::uint16_t FloatToHalfBits(float value) {
  const std::uint32_t all = BitsOf(value);
  const std::uint32_t sign = (all >> 16) & 0x8000u;
  const std::uint32_t bits = all & 0x7fffffffu;
  // Below 2^-14 the result is subnormal: adding 0.5 lets the FPU shift and round the mantissa.
  const std::uint32_t subnormal = BitsOf(FloatOf(bits) + 0.5f) - 0x3f000000u;
  const std::uint32_t odd = (bits >> 13) & 1u;
  const std::uint32_t normal = (bits - 0x38000000u + 0xfffu + odd) >> 13;
  const std::uint32_t special = bits > 0x7f800000u ? 0x7e00u | ((bits >> 13) & 0x1ffu) : 0x7c00u;
  const std::uint32_t finite = bits < 0x38800000u ? subnormal : normal;
  return static_cast<std::uint16_t>((bits >= 0x47800000u ? special : finite) | sign);
}

inline float BfloatBitsToFloat(std::uint16_t bits) {
  return FloatOf(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t FloatToBfloatBits(float value) {
  const std::uint32_t bits = BitsOf(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

}  // namespace internal

struct Float16 {
  std::uint16_t bits = 0;

  Float16() = default;
  explicit Float16(float value) : bits(internal::FloatToHalfBits(value)) {}
  explicit operator float() const { return internal::HalfBitsToFloat(bits); }
};

struct Bfloat16 {
  std::uint16_t bits = 0;

  Bfloat16() = default;
  explicit Bfloat16(float value) : bits(internal::FloatToBfloatBits(value)) {}
  explicit operator float() const { return internal::BfloatBitsToFloat(bits); }
};

}  // namespace keras_ring

#endif  // KERAS_RING_CORE_FLOAT16_H_
