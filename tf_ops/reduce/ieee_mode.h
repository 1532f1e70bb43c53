// Computing as IEEE 754 says, whatever mode the calling thread's processor is in.
#ifndef KERAS_RING_REDUCE_IEEE_MODE_H_
#define KERAS_RING_REDUCE_IEEE_MODE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace keras_ring {

// Rounds to nearest and keeps subnormals for as long as it lives. TensorFlow's threads flush
// subnormals to zero, the engine's does not, and either may carry out a request: without this the
// bits of a result would depend on time.
class IeeeMode {
 public:
  IeeeMode() : before_(Get()) {
    // Reading costs next to nothing, writing some ten cycles.
    if ((before_ & kOther) != 0) Set(before_ & ~kOther);
  }
  ~IeeeMode() {
    if ((before_ & kOther) != 0) Set(before_);
  }
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = std::uint32_t;
  static constexpr Word kOther = 0xe040;  // of MXCSR: flush to zero, rounding, denormals are zeros
  static Word Get() { return _mm_getcsr(); }
  static void Set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  // Of FPCR: alternative half precision, default NaN, flush to zero, rounding, and FZ16.
  static constexpr Word kOther = 0x07c80000;
  static Word Get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void Set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
  using Word = std::uint32_t;
  static constexpr Word kOther = 0;
  static Word Get() { return 0; }
  static void Set(Word) {}
#endif

  const Word before_;
};

}  // namespace keras_ring

#endif  // KERAS_RING_REDUCE_IEEE_MODE_H_
