// The state of this process: the engines of the current generation, one for the world and one for
// each process set that this rank is in. Everything else in tf_ops/ is free of globals.
#ifndef KERAS_RING_OPS_PROCESS_H_
#define KERAS_RING_OPS_PROCESS_H_

#include "engine/request.h"

namespace keras_ring {

// The process set of all ranks.
constexpr int kWorld = 0;

// Hands the request to the engine of a process set; ends it with an error when there is none:
// before init, after shutdown, or in a process that was forked after init. Thread: any.
__attribute__((visibility("default"))) void Submit(int process_set, Request request);

}  // namespace keras_ring

#endif  // KERAS_RING_OPS_PROCESS_H_
