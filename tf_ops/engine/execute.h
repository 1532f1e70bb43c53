// Runs the requests of one bucket over the wire. The only place that turns requests into
// collectives.
#ifndef KERAS_RING_ENGINE_EXECUTE_H_
#define KERAS_RING_ENGINE_EXECUTE_H_

#include <vector>

#include "collectives/hierarchical.h"
#include "collectives/local.h"
#include "collectives/wire.h"
#include "core/algorithm.h"
#include "engine/request.h"

namespace keras_ring {

// The wires of one rank.
struct Routes {
  Wire world;       // all ranks
  Between between;  // the hosts
  LocalWire local;  // the ranks of this host; no arena: not to be used
  Algorithm allreduce = Algorithm::kRing;
  Algorithm movement = Algorithm::kRing;  // of what is only moved: allgather, broadcast
  bool is_one_host = false;               // all ranks share the arena
};

// `bucket` is as planned by PlanBuckets. Fills the outputs; does not call `done`. Throws Error.
void Execute(const Routes& routes, const std::vector<Request*>& bucket);

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_EXECUTE_H_
