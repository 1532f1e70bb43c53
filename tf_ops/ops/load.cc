// Runs when Python loads the ops: TensorFlow expects definitions and kernels to be registered while
// the library is being loaded.
#include <string>

#include "ops/c_api.h"
#include "ops/kernels.h"
#include "ops/op_defs.h"
#include "ops/tf_api.h"
#include "ops/xla_handlers.h"

namespace {

std::string& Problem() {
  static auto* problem = new std::string;
  return *problem;
}

std::string& XlaProblem() {
  static auto* problem = new std::string;
  return *problem;
}

__attribute__((constructor)) void Load() {
  const std::string& missing = keras_ring::Tf().missing;
  if (!missing.empty()) {
    Problem() = "the TensorFlow in this process lacks " + missing;
    return;
  }
  Problem() = keras_ring::RegisterOps();
  if (Problem().empty()) Problem() = keras_ring::RegisterKernels();
  XlaProblem() = keras_ring::RegisterXlaHandlers();
}

}  // namespace

// What went wrong while loading; "" when nothing did.
extern "C" KERAS_RING_EXPORT const char* keras_ring_ops_problem(void) { return Problem().c_str(); }

// Why no collective can be compiled by XLA; "" when all is well.
extern "C" KERAS_RING_EXPORT const char* keras_ring_xla_problem(void) {
  return XlaProblem().c_str();
}
