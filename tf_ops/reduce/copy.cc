#include "reduce/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace keras_ring {

void CopyPastCache(void* to, const void* from, std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64;
  auto* t = static_cast<char*>(to);
  const auto* f = static_cast<const char*>(from);
  // Whole lines of the target are streamed; what is before and after them is copied as usual.
  const std::size_t before = (kLine - reinterpret_cast<std::uintptr_t>(t) % kLine) % kLine;
  if (bytes >= before + kLine) {
    std::memcpy(t, f, before);
    t += before;
    f += before;
    bytes -= before;
    for (; bytes >= kLine; bytes -= kLine, t += kLine, f += kLine) {
      for (std::size_t i = 0; i < kLine; i += sizeof(__m128i)) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(t + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(f + i)));
      }
    }
    // Others may look at the memory as soon as they are told that it is written.
    _mm_sfence();
  }
  to = t;
  from = f;
#endif
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace keras_ring
