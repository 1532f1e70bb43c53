// The loops of the arithmetic, once for each level of a processor. loops.h holds them; each
// kernels_*.cc compiles it for one level.
#ifndef KERAS_RING_REDUCE_KERNELS_H_
#define KERAS_RING_REDUCE_KERNELS_H_

#include <cstddef>

#include "core/dtype.h"
#include "reduce/reduce.h"

// Other compilers name the processor's subsets in other ways; theirs is the portable form.
#if defined(__GNUC__) && !defined(__clang__)
#if defined(__x86_64__)
#define KERAS_RING_X86_LEVELS 1
#elif defined(__aarch64__)
#define KERAS_RING_NEON_LEVEL 1
#endif
#endif

namespace keras_ring {

// Each as the function of the same name in reduce.h.
struct Kernels {
  void (*combine)(DType dtype, ReduceOp op, Format partial_format, const void* partial,
                  const void* own, const Scale& scale, void* to, std::size_t elems);
  void (*widen)(DType dtype, const void* from, const Scale& scale, void* to, std::size_t elems);
  void (*scale_to)(DType dtype, Format from_format, const void* from, const Scale& scale, void* to,
                   std::size_t elems);
};

const Kernels& PortableKernels();
const Kernels& Avx2Kernels();
const Kernels& Avx512Kernels();
const Kernels& NeonKernels();

// Of the current level.
const Kernels& CurrentKernels();

}  // namespace keras_ring

#endif  // KERAS_RING_REDUCE_KERNELS_H_
