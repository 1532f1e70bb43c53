// The order of additions between hosts, and worlds of all shapes.
#include "collectives/hierarchical.h"

#include <random>
#include <vector>

#include "check.h"
#include "reference_sum.h"

namespace keras_ring {
namespace {

using check::Note;
using Tensor = Brought<float>;

void CheckBucket(const World& world, const std::vector<Tensor>& tensors, bool in_place) {
  std::vector<std::vector<float>> wanted;
  for (const Tensor& tensor : tensors) {
    wanted.push_back(ReferenceSum(world.topology, tensor, 1, [](float sum) { return sum; }));
  }
  CheckBucket(world, Bucket{}, tensors, wanted, in_place,
              [](const Routes& routes, const Bucket& bucket) {
                HierarchicalAllreduce(routes.local, routes.between, bucket);
              });
}

TEST("random buckets: the bits of the one order of additions, on every rank") {
  std::minstd_rand random(7);
  for (const auto& hosts : kWorlds) {
    for (int round = 0; round < 12; ++round) {
      World world = Hosts(hosts, round % 3 == 0 ? Sends::kLate : Sends::kAtOnce);
      const int size = world.topology.size();
      world.slot_bytes = 16 * size * (1 + random() % 20);
      std::vector<Tensor> tensors;
      const std::size_t num_tensors = 1 + random() % 12;
      for (std::size_t i = 0; i < num_tensors; ++i) {
        tensors.push_back(
            RandomTensor<float>(size, random() % 4 == 0 ? 0 : random() % 900, &random));
      }
      const Note note("hosts ", hosts, ", round ", round, ", slots of ", world.slot_bytes);
      CheckBucket(world, tensors, /*in_place=*/random() % 2 == 0);
    }
  }
}

TEST("the bits of a tensor do not depend on what it is fused with, nor on the slots") {
  std::minstd_rand random(11);
  for (const auto& hosts : kWorlds) {
    World world = Hosts(hosts);
    const int size = world.topology.size();
    const Tensor tensor = RandomTensor<float>(size, 1201, &random);
    const Tensor other = RandomTensor<float>(size, 333, &random);
    for (const std::size_t slot_bytes : {16 * size, 4096}) {
      const Note note("hosts ", hosts, ", slots of ", slot_bytes);
      world.slot_bytes = slot_bytes;
      CheckBucket(world, {tensor}, /*in_place=*/true);
      CheckBucket(world, {other, tensor, other, other}, /*in_place=*/false);
    }
  }
}

TEST("a bucket that travels whole gets the bits that a ring would give it") {
  std::minstd_rand random(13);
  for (const auto& hosts : kWorlds) {
    for (const Sends sends : {Sends::kAtOnce, Sends::kLate}) {
      const Note note("hosts ", hosts);
      World world = Hosts(hosts, sends);
      const int size = world.topology.size();
      const std::vector<Tensor> tensors = {RandomTensor<float>(size, 1, &random),
                                           RandomTensor<float>(size, 0, &random),
                                           RandomTensor<float>(size, 301, &random)};
      // One window, and many.
      for (const std::size_t slot_bytes : {std::size_t{1 << 16}, std::size_t(16 * size)}) {
        world.slot_bytes = slot_bytes;
        CheckBucket(world, tensors, /*in_place=*/false);
      }
    }
  }
}

TEST("hundreds of buckets one after the other, of which some are empty") {
  for (const auto& hosts : kWorlds) {
    RunRanks(Hosts(hosts, Sends::kLate), [&](const Routes& routes) {
      const int size = routes.world.size();
      for (std::int64_t i = 0; i < 200; ++i) {
        const std::int64_t elems = i * 13 % 57;
        std::vector<std::int64_t> values(elems, routes.world.rank() + i);
        Bucket bucket;
        bucket.dtype = DType::kInt64;
        bucket.tensors = {{values.data(), values.data(), elems, i}};
        HierarchicalAllreduce(routes.local, routes.between, bucket);
        CHECK_EQ(values, std::vector<std::int64_t>(elems, size * i + size * (size - 1) / 2));
      }
    });
  }
}

}  // namespace
}  // namespace keras_ring
