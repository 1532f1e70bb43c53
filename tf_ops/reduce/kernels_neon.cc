// For aarch64, all of which convert float16; for bfloat16 there is no more than integers.
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce/kernels.h"

#if defined(KERAS_RING_NEON_LEVEL)
#include <arm_neon.h>

namespace keras_ring {
namespace {

constexpr std::size_t kLanes = 4;

struct Isa {
  using Floats = float32x4_t;

  static float32x4_t Load(const float* from) { return vld1q_f32(from); }
  static float32x4_t Load(const Float16* from) {
    return vcvt_f32_f16(
        vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(from))));
  }
  static float32x4_t Load(const Bfloat16* from) {
    return vreinterpretq_f32_u32(
        vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(from)), 16));
  }
  static void Store(float32x4_t value, float* to) { vst1q_f32(to, value); }
  static void Store(float32x4_t value, Float16* to) {
    vst1_u16(reinterpret_cast<std::uint16_t*>(to), vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }
  static void Store(float32x4_t value, Bfloat16* to) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(reinterpret_cast<std::uint16_t*>(to),
             vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), rounded, nan), 16));
  }
};

}  // namespace
}  // namespace keras_ring

#include "reduce/loops.h"

namespace keras_ring {

const Kernels& NeonKernels() {
  static constexpr Kernels kKernels = {CombineAny, WidenAny, ScaleAny};
  return kKernels;
}

}  // namespace keras_ring
#endif
