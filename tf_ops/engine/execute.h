// Runs the requests of one bucket over the wire. The only place that turns requests into
// collectives.
#ifndef KERAS_RING_ENGINE_EXECUTE_H_
#define KERAS_RING_ENGINE_EXECUTE_H_

#include <vector>

#include "collectives/wire.h"
#include "engine/request.h"

namespace keras_ring {

// `bucket` is as planned by PlanBuckets. Fills the outputs; does not call `done`. Throws Error.
void Execute(const Wire& wire, const std::vector<Request*>& bucket);

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_EXECUTE_H_
