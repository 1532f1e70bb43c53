// For x86-64 with the subsets of AVX-512 that all its server processors have.
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce/kernels.h"

#if defined(KERAS_RING_X86_LEVELS)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=256")

namespace keras_ring {
namespace {

constexpr std::size_t kLanes = 16;

// The forms without a mask begin with an undefined register, which GCC 12 warns of.
constexpr __mmask16 kAll = 0xffff;

struct Isa {
  using Floats = __m512;

  static __m512 Load(const float* from) { return _mm512_loadu_ps(from); }
  static __m512 Load(const Float16* from) {
    return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static __m512 Load(const Bfloat16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, bits), 16));
  }
  static void Store(__m512 value, float* to) { _mm512_storeu_ps(to, value); }
  static void Store(__m512 value, Float16* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_maskz_cvtps_ph(kAll, value, _MM_FROUND_TO_NEAREST_INT));
  }
  static void Store(__m512 value, Bfloat16* to) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i upper = _mm512_maskz_srli_epi32(kAll, bits, 16);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_maskz_srli_epi32(kAll, _mm512_add_epi32(bits, up), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(kAll, chosen));
  }
};

}  // namespace
}  // namespace keras_ring

#include "reduce/loops.h"

namespace keras_ring {
namespace {

// GCC 12 makes vfmaddsub, which rounds once where all others round twice, of a product of complex
// numbers, whatever -ffp-contract says. Without that instruction the product is as fast.
void CombineUnfused(DType dtype, ReduceOp op, Format partial_format, const void* partial,
                    const void* own, const Scale& scale, void* to, std::size_t elems) {
  if (IsComplex(dtype) && op == ReduceOp::kProduct) {
    return Avx2Kernels().combine(dtype, op, partial_format, partial, own, scale, to, elems);
  }
  CombineAny(dtype, op, partial_format, partial, own, scale, to, elems);
}

}  // namespace

const Kernels& Avx512Kernels() {
  static constexpr Kernels kUnfused = {CombineUnfused, WidenAny, ScaleAny};
  return kUnfused;
}

}  // namespace keras_ring

#pragma GCC pop_options
#endif
