// Which of the compiled forms of the arithmetic runs: chosen once, by what the processor offers.
// All give the same bits, for the hosts of a job may differ. (Where operands are NaN so is the
// result; which of a NaN's bits are set is the processor's.)
#ifndef KERAS_RING_REDUCE_LEVEL_H_
#define KERAS_RING_REDUCE_LEVEL_H_

#include <cstdint>
#include <vector>

namespace keras_ring {

// kPortable runs on every processor that the library is built for. kAvx2 needs F16C too, kAvx512
// the subsets F, BW, DQ and VL. There is no level for AVX512-BF16: its conversions flush
// subnormals.
enum class Level : std::uint8_t { kPortable, kAvx2, kAvx512, kNeon };

const char* LevelName(Level level);

// What this processor can run and this library was built with, the best one last.
const std::vector<Level>& SupportedLevels();

// The best, unless another was forced.
Level CurrentLevel();

// For tests and measurements. `level` must be a supported one. Not to be called while other threads
// work.
void ForceLevel(Level level);

}  // namespace keras_ring

#endif  // KERAS_RING_REDUCE_LEVEL_H_
