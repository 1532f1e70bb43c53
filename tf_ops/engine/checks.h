// What a call is refused for, whatever the other ranks call.
#ifndef KERAS_RING_ENGINE_CHECKS_H_
#define KERAS_RING_ENGINE_CHECKS_H_

#include "core/status.h"
#include "engine/request.h"
#include "transport/topology.h"

namespace keras_ring {

// What every rank that makes this call is refused for, each by itself.
Status CheckCall(const Request& request, const Topology& topology);

// Splits are data: one rank's may be wrong while the others wait for it. Then the problem becomes
// part of the signature, which fails the request on every rank; alone, it is the error.
Status CheckSplits(Request* request, int size);

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_CHECKS_H_
