// For x86-64 with AVX2 and F16C, whose conversions give the portable ones' bits.
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce/kernels.h"

#if defined(KERAS_RING_X86_LEVELS)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,f16c")

namespace keras_ring {
namespace {

constexpr std::size_t kLanes = 8;

struct Isa {
  using Floats = __m256;

  static __m256 Load(const float* from) { return _mm256_loadu_ps(from); }
  static __m256 Load(const Float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static __m256 Load(const Bfloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static void Store(__m256 value, float* to) { _mm256_storeu_ps(to, value); }
  static void Store(__m256 value, Float16* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  static void Store(__m256 value, Bfloat16* to) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    const __m256i nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_blendv_epi8(rounded, nan, is_nan);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to),
        _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1)));
  }
};

}  // namespace
}  // namespace keras_ring

#include "reduce/loops.h"

namespace keras_ring {

const Kernels& Avx2Kernels() {
  static constexpr Kernels kKernels = {CombineAny, WidenAny, ScaleAny};
  return kKernels;
}

}  // namespace keras_ring

#pragma GCC pop_options
#endif
