// Collectives among the ranks of one host, in the memory that they share: no message, no system
// call but to sleep.
//
// A bucket goes through in windows. In each, every rank owns one part:
//
//   pack     copies all parts but its own into its slot, for their owners to read
//   reduce   sums its own part straight from the others' slots and its own tensors, and leaves the
//            result in its slot, where its own input would have been, and in its tensors
//   copy     takes the other parts' results from their owners' slots
//
// A rank packs one window, reduces the one before and copies the one before that, so that it seldom
// waits, and the data is touched while it is in cache. The inputs are added in the order of the
// ranks, so the bits do not depend on the windows, on fusion or on time.
#ifndef KERAS_RING_COLLECTIVES_LOCAL_H_
#define KERAS_RING_COLLECTIVES_LOCAL_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "collectives/gather_plan.h"
#include "collectives/ring.h"
#include "core/stages.h"
#include "transport/transport.h"

namespace keras_ring {

// Where a local collective runs. Every local rank calls it with equal arguments but for the memory.
struct LocalWire {
  Arena* arena = nullptr;
  Idle* idle = nullptr;
  Stages* stages = nullptr;  // null: not measured
};

// Every local rank calls it with a bucket of the same shape; all hold the same bits afterwards.
// Cost per rank: S read and written in the tensors, about 2 S in the slots, which stay in cache.
void LocalAllreduce(const LocalWire& wire, const Bucket& bucket);

// See RingAllgather. Cost per rank: each block is written once and read by all.
void LocalAllgather(const LocalWire& wire, const void* input,
                    const std::vector<std::int64_t>& block_bytes, void* output);

// The same where the blocks, by local rank, do not follow each other.
void LocalAllgather(const LocalWire& wire, const void* input, const Pieces& outputs);

// See TreeBroadcast. `root` is a local rank; where its data is still coming, `await_until(end)`
// waits for the first `end` bytes.
void LocalBroadcast(const LocalWire& wire, int root, void* data, std::int64_t bytes,
                    const std::function<void(std::int64_t)>& await_until = nullptr);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_LOCAL_H_
