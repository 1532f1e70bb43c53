#include "collectives/hierarchical.h"

namespace keras_ring {

void HierarchicalAllreduce(const LocalWire& local, const Wire& across, const Bucket& bucket) {
  const auto between = [&](void* accumulators, std::int64_t elems) {
    Bucket sums;
    sums.dtype = AccumulatorDType(bucket.dtype);
    sums.op = bucket.op;
    sums.tensors.push_back(BucketTensor{accumulators, accumulators, elems, 0});
    RingAllreduce(across, sums);
  };
  LocalAllreduceAround(local, bucket, between);
}

}  // namespace keras_ring
