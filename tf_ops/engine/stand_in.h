// What a rank that has joined brings to the others' requests: nothing, in the right shape.
#ifndef KERAS_RING_ENGINE_STAND_IN_H_
#define KERAS_RING_ENGINE_STAND_IN_H_

#include <string>

#include "engine/request.h"

namespace keras_ring {

// A request with memory of its own that changes no other rank's result: neutral values for a
// reduction, no rows for a gathering. Results that it gets go nowhere. Alltoall, reducescatter and
// a broadcast from this rank are refused before (see Readiness).
Request StandIn(const std::string& name, const Signature& signature);

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_STAND_IN_H_
