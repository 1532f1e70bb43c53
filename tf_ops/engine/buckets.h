// Which requests of a batch are fused into one transfer.
#ifndef KERAS_RING_ENGINE_BUCKETS_H_
#define KERAS_RING_ENGINE_BUCKETS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/request.h"

namespace keras_ring {

// Pure: indices into `batch`, bucket by bucket. Allreduces of one dtype, operation, scale and
// compression share a bucket of at most `bucket_bytes`, in the order of the batch; a larger
// request, and every request of another kind, is alone. The same on all ranks, since it looks at
// signatures only.
std::vector<std::vector<std::size_t>> PlanBuckets(const std::vector<const Signature*>& batch,
                                                  std::int64_t bucket_bytes);

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_BUCKETS_H_
