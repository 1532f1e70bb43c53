#include "reduce/level.h"

#include "reduce/kernels.h"

#if defined(KERAS_RING_X86_LEVELS)
#include <cpuid.h>
#endif

namespace keras_ring {
namespace {

#if defined(KERAS_RING_X86_LEVELS)
bool HasF16c() {
  constexpr unsigned kF16c = 1u << 29;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & kF16c) != 0;
}
#endif

std::vector<Level> FindLevels() {
  std::vector<Level> levels = {Level::kPortable};
#if defined(KERAS_RING_X86_LEVELS)
  // These look at what the operating system saves of a thread, too.
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && HasF16c();
  if (has_avx2) levels.push_back(Level::kAvx2);
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    levels.push_back(Level::kAvx512);
  }
#elif defined(KERAS_RING_NEON_LEVEL)
  levels.push_back(Level::kNeon);
#endif
  return levels;
}

const Kernels& KernelsOf(Level level) {
  switch (level) {
#if defined(KERAS_RING_X86_LEVELS)
    case Level::kAvx2:
      return Avx2Kernels();
    case Level::kAvx512:
      return Avx512Kernels();
#elif defined(KERAS_RING_NEON_LEVEL)
    case Level::kNeon:
      return NeonKernels();
#endif
    default:
      return PortableKernels();
  }
}

struct Choice {
  Level level = SupportedLevels().back();
  const Kernels* kernels = &KernelsOf(level);
};

Choice& Current() {
  static Choice choice;
  return choice;
}

}  // namespace

const char* LevelName(Level level) {
  switch (level) {
    case Level::kPortable:
      return "portable";
    case Level::kAvx2:
      return "avx2";
    case Level::kAvx512:
      return "avx512";
    case Level::kNeon:
      return "neon";
  }
  return "unknown";
}

const std::vector<Level>& SupportedLevels() {
  static const std::vector<Level> levels = FindLevels();
  return levels;
}

Level CurrentLevel() { return Current().level; }

void ForceLevel(Level level) { Current() = Choice{level, &KernelsOf(level)}; }

const Kernels& CurrentKernels() { return *Current().kernels; }

}  // namespace keras_ring
