// The order of additions between hosts, and worlds of all shapes.
#include "collectives/hierarchical.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "collectives/schedule.h"
#include "ranks.h"

namespace keras_ring {
namespace {

using check::Note;
using Values = std::vector<float>;

// One tensor: what each rank brings, and the chunk that gets its first piece.
struct Tensor {
  std::vector<Values> inputs;  // by rank
  std::int64_t first_chunk = 0;

  std::int64_t elems() const { return static_cast<std::int64_t>(inputs[0].size()); }
};

// The sums of float32 values of all magnitudes depend on the order of the additions.
Tensor RandomTensor(int size, std::int64_t elems, std::minstd_rand* random) {
  Tensor tensor;
  std::normal_distribution<float> magnitude(0.0f, 3.0f);
  for (int rank = 0; rank < size; ++rank) {
    Values values(elems);
    for (float& value : values) value = std::exp(magnitude(*random)) - 1.0f;
    tensor.inputs.push_back(values);
  }
  tensor.first_chunk = (*random)() % 1000;
  return tensor;
}

// Within a host by rank; between hosts beginning with the one that the chunk is numbered after. No
// word of windows, segments or what else is in the bucket.
Values ReferenceSum(const Topology& topology, const Tensor& tensor) {
  const int num_hosts = topology.num_nodes();
  const int num_chunks = num_hosts * topology.num_lanes();
  std::vector<Values> sums(num_hosts, Values(tensor.elems()));
  for (int host = 0; host < num_hosts; ++host) {
    bool is_first = true;
    for (int rank = 0; rank < topology.size(); ++rank) {
      if (topology.node_of[rank] != host) continue;
      for (std::int64_t j = 0; j < tensor.elems(); ++j) {
        sums[host][j] = is_first ? tensor.inputs[rank][j] : sums[host][j] + tensor.inputs[rank][j];
      }
      is_first = false;
    }
  }
  Values result(tensor.elems());
  for (int piece = 0; piece < num_chunks; ++piece) {
    const auto chunk = static_cast<int>((piece + tensor.first_chunk) % num_chunks);
    const Range range = PartOf(tensor.elems(), num_chunks, piece);
    for (std::int64_t j = range.begin; j < range.end; ++j) {
      result[j] = sums[chunk % num_hosts][j];
      for (int step = 1; step < num_hosts; ++step) {
        result[j] += sums[(chunk + step) % num_hosts][j];
      }
    }
  }
  return result;
}

void CheckBucket(const World& world, const std::vector<Tensor>& tensors, bool in_place) {
  std::vector<Values> wanted;
  for (const Tensor& tensor : tensors) wanted.push_back(ReferenceSum(world.topology, tensor));
  RunRanks(world, [&](const Routes& routes) {
    std::vector<Values> inputs;
    std::vector<Values> outputs;
    Bucket bucket;
    for (const Tensor& tensor : tensors) {
      inputs.push_back(tensor.inputs[routes.world.rank()]);
      outputs.emplace_back(tensor.elems());
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      bucket.tensors.push_back({inputs[i].data(), in_place ? inputs[i].data() : outputs[i].data(),
                                tensors[i].elems(), tensors[i].first_chunk});
    }
    HierarchicalAllreduce(routes.local, routes.between, bucket);
    const Note note("rank ", routes.world.rank());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      CHECK_EQ(in_place ? inputs[i] : outputs[i], wanted[i]);
    }
  });
}

const std::vector<std::vector<int>> kWorlds = {{0, 1, 1, 1},        // 1 + 3
                                               {0, 0, 1, 2, 2, 2},  // 2 + 1 + 3
                                               {0, 1, 1, 0, 0},     // 3 + 2, mixed
                                               {0, 0, 1, 1, 2, 2},
                                               {0, 1, 2, 3, 1, 3},  // 1 + 2 + 1 + 2
                                               {0, 0, 1, 1, 2, 2, 3, 3}};

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
        tensors.push_back(RandomTensor(size, random() % 4 == 0 ? 0 : random() % 900, &random));
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
    const Tensor tensor = RandomTensor(size, 1201, &random);
    const Tensor other = RandomTensor(size, 333, &random);
    for (const std::size_t slot_bytes : {16 * size, 4096}) {
      const Note note("hosts ", hosts, ", slots of ", slot_bytes);
      world.slot_bytes = slot_bytes;
      CheckBucket(world, {tensor}, /*in_place=*/true);
      CheckBucket(world, {other, tensor, other, other}, /*in_place=*/false);
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
