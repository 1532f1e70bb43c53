// The ways to run an allreduce.
#ifndef KERAS_RING_CORE_ALGORITHM_H_
#define KERAS_RING_CORE_ALGORITHM_H_

#include <cstdint>

namespace keras_ring {

// The numbers are part of the C API.
enum class Algorithm : std::uint8_t { kAuto = 0, kRing = 1, kLocal = 2, kHierarchical = 3 };

}  // namespace keras_ring

#endif  // KERAS_RING_CORE_ALGORITHM_H_
