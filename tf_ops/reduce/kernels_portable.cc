// For every processor: the compiler vectorises with what all of them have.
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce/kernels.h"

namespace keras_ring {
namespace {

constexpr std::size_t kLanes = 1;

struct Isa {
  using Floats = float;
  template <typename T>
  static float Load(const T* from) {
    return static_cast<float>(*from);
  }
  template <typename T>
  static void Store(float value, T* to) {
    *to = static_cast<T>(value);
  }
};

}  // namespace
}  // namespace keras_ring

#include "reduce/loops.h"

namespace keras_ring {

const Kernels& PortableKernels() {
  static constexpr Kernels kKernels = {CombineAny, WidenAny, ScaleAny};
  return kKernels;
}

}  // namespace keras_ring
