#include "engine/buckets.h"

#include "check.h"

namespace keras_ring {
namespace {

using Buckets = std::vector<std::vector<std::size_t>>;

Signature Allreduce(std::int64_t elems, DType dtype = DType::kFloat32) {
  Signature signature;
  signature.kind = Kind::kAllreduce;
  signature.dtypes = {dtype};
  signature.shapes = {{elems}};
  return signature;
}

Buckets Plan(const std::vector<Signature>& batch, std::int64_t bucket_bytes) {
  std::vector<const Signature*> pointers;
  for (const Signature& signature : batch) pointers.push_back(&signature);
  return PlanBuckets(pointers, bucket_bytes);
}

TEST("an empty batch has no buckets") { CHECK_EQ(Plan({}, 100), Buckets{}); }

TEST("allreduces of the same arithmetic share a bucket up to its bytes") {
  const std::vector<Signature> batch(5, Allreduce(10));  // 40 bytes each
  CHECK_EQ(Plan(batch, 80), (Buckets{{0, 1}, {2, 3}, {4}}));
  CHECK_EQ(Plan(batch, 79), (Buckets{{0}, {1}, {2}, {3}, {4}}));
  CHECK_EQ(Plan(batch, 1000), (Buckets{{0, 1, 2, 3, 4}}));
}

TEST("a request larger than a bucket travels alone") {
  CHECK_EQ(Plan({Allreduce(1), Allreduce(1000), Allreduce(1)}, 100), (Buckets{{0}, {1}, {2}}));
}

TEST("requests of no bytes join whatever is open") {
  CHECK_EQ(Plan({Allreduce(25), Allreduce(0), Allreduce(0)}, 100), (Buckets{{0, 1, 2}}));
}

TEST("different dtypes have buckets side by side, in the order of the batch") {
  const Signature f = Allreduce(1);
  const Signature h = Allreduce(1, DType::kFloat16);
  CHECK_EQ(Plan({f, h, f, h, f}, 100), (Buckets{{0, 2, 4}, {1, 3}}));
}

TEST("another operation, mean or scale does not fit") {
  std::vector<Signature> batch(6, Allreduce(1));
  batch[1].op = ReduceOp::kMax;
  batch[2].is_mean = true;
  batch[3].prescale = 2;
  batch[4].postscale = 2;
  CHECK_EQ(Plan(batch, 100), (Buckets{{0, 5}, {1}, {2}, {3}, {4}}));
}

TEST("every request of another kind is alone") {
  std::vector<Signature> batch(6, Allreduce(1));
  batch[0].kind = batch[1].kind = Kind::kAllgather;
  batch[2].kind = batch[3].kind = Kind::kBroadcast;
  batch[4].kind = batch[5].kind = Kind::kBarrier;
  batch[4].dtypes = batch[5].dtypes = {};
  batch[4].shapes = batch[5].shapes = {};
  CHECK_EQ(Plan(batch, 100), (Buckets{{0}, {1}, {2}, {3}, {4}, {5}}));
}

TEST("the tensors of a grouped request count together and stay together") {
  Signature group = Allreduce(10);
  group.dtypes = {DType::kFloat32, DType::kFloat32};
  group.shapes = {{2, 5}, {}};  // 44 bytes
  CHECK_EQ(Plan({Allreduce(10), group, group}, 84), (Buckets{{0, 1}, {2}}));
  CHECK_EQ(Plan({Allreduce(10), group, group}, 83), (Buckets{{0}, {1}, {2}}));
}

}  // namespace
}  // namespace keras_ring
