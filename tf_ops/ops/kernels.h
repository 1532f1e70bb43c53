// The kernels: asynchronous, one for all ops, on the CPU and (with host memory) on the GPU.
#ifndef KERAS_RING_OPS_KERNELS_H_
#define KERAS_RING_OPS_KERNELS_H_

#include <string>

namespace keras_ring {

// Registers all kernels; returns an error message or "".
std::string RegisterKernels();

}  // namespace keras_ring

#endif  // KERAS_RING_OPS_KERNELS_H_
