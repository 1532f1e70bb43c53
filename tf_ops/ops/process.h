// The state of this process: the engine of the current generation. Everything else in tf_ops/ is
// free of globals.
#ifndef KERAS_RING_OPS_PROCESS_H_
#define KERAS_RING_OPS_PROCESS_H_

#include "engine/request.h"

namespace keras_ring {

// Hands the request to the engine; ends it with an error when there is none: before init, after
// shutdown, or in a process that was forked after init. Thread: any.
__attribute__((visibility("default"))) void Submit(Request request);

}  // namespace keras_ring

#endif  // KERAS_RING_OPS_PROCESS_H_
