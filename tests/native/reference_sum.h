// What an allreduce between hosts must give, to the bit.
#ifndef KERAS_RING_TESTS_NATIVE_REFERENCE_SUM_H_
#define KERAS_RING_TESTS_NATIVE_REFERENCE_SUM_H_

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "collectives/hierarchical.h"
#include "collectives/ring.h"
#include "collectives/schedule.h"
#include "ranks.h"

// One tensor: what each rank brings, and the chunk that gets its first piece.
template <typename T>
struct Brought {
  std::vector<std::vector<T>> inputs;  // by rank
  std::int64_t first_chunk = 0;

  std::int64_t elems() const { return static_cast<std::int64_t>(inputs[0].size()); }
};

// The sums of values of all magnitudes depend on the order of the additions.
template <typename T>
Brought<T> RandomTensor(int size, std::int64_t elems, std::minstd_rand* random) {
  Brought<T> tensor;
  std::normal_distribution<T> magnitude(0, 3);
  for (int rank = 0; rank < size; ++rank) {
    std::vector<T> values(elems);
    for (T& value : values) value = std::exp(magnitude(*random)) - 1;
    tensor.inputs.push_back(values);
  }
  tensor.first_chunk = (*random)() % 1000;
  return tensor;
}

// Within a host by rank; between hosts beginning with the one that the chunk is numbered after,
// where `carried` is what a value becomes on its way to another. No word of windows, segments or
// what else is in the bucket.
template <typename T, typename Carried>
std::vector<T> ReferenceSum(const keras_ring::Topology& topology, const Brought<T>& tensor,
                            std::int64_t divisor, const Carried& carried) {
  const int num_hosts = topology.num_nodes();
  const int num_chunks = num_hosts * topology.num_lanes();
  std::vector<std::vector<T>> sums(num_hosts, std::vector<T>(tensor.elems()));
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
  std::vector<T> result(tensor.elems());
  for (int piece = 0; piece < num_chunks; ++piece) {
    const auto chunk = static_cast<int>((piece + tensor.first_chunk) % num_chunks);
    const keras_ring::Range range = keras_ring::PartOf(tensor.elems(), num_chunks, piece);
    for (std::int64_t j = range.begin; j < range.end; ++j) {
      T sum = sums[chunk % num_hosts][j];
      for (int step = 1; step < num_hosts; ++step) {
        sum = carried(sum) + sums[(chunk + step) % num_hosts][j];
      }
      result[j] = carried(sum / static_cast<T>(divisor));
    }
  }
  return result;
}

// Runs `allreduce(routes, bucket)` on every rank with the tensors in one bucket like `how`, and
// compares all results.
template <typename T, typename Allreduce>
void CheckBucket(const World& world, const keras_ring::Bucket& how,
                 const std::vector<Brought<T>>& tensors, const std::vector<std::vector<T>>& wanted,
                 bool in_place, const Allreduce& allreduce) {
  RunRanks(world, [&](const keras_ring::Routes& routes) {
    std::vector<std::vector<T>> inputs;
    std::vector<std::vector<T>> outputs;
    keras_ring::Bucket bucket = how;
    for (const Brought<T>& tensor : tensors) {
      inputs.push_back(tensor.inputs[routes.world.rank()]);
      outputs.emplace_back(tensor.elems());
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      bucket.tensors.push_back({inputs[i].data(), in_place ? inputs[i].data() : outputs[i].data(),
                                tensors[i].elems(), tensors[i].first_chunk});
    }
    allreduce(routes, bucket);
    const check::Note note("rank ", routes.world.rank());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      CHECK_EQ(in_place ? inputs[i] : outputs[i], wanted[i]);
    }
  });
}

// The host of each rank.
inline const std::vector<std::vector<int>> kWorlds = {{0, 1, 1, 1},        // 1 + 3
                                                      {0, 0, 1, 2, 2, 2},  // 2 + 1 + 3
                                                      {0, 1, 1, 0, 0},     // 3 + 2, mixed
                                                      {0, 0, 1, 1, 2, 2},
                                                      {0, 1, 2, 2, 1, 0},  // another order
                                                      {0, 1, 2, 3, 1, 3},  // 1 + 2 + 1 + 2
                                                      {0, 0, 1, 1, 2, 2, 3, 3}};

#endif  // KERAS_RING_TESTS_NATIVE_REFERENCE_SUM_H_
