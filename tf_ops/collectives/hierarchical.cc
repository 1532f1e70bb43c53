#include "collectives/hierarchical.h"

#include <vector>

namespace keras_ring {

void HierarchicalAllreduce(const LocalWire& local, const Wire& across, const Bucket& bucket) {
  const auto between = [&](const std::vector<BucketTensor>& chunks) {
    Bucket sums;
    sums.dtype = AccumulatorDType(bucket.dtype);
    sums.op = bucket.op;
    sums.tensors = chunks;
    RingAllreduce(across, sums);
  };
  LocalAllreduceAround(local, bucket, across.size(), between);
}

}  // namespace keras_ring
