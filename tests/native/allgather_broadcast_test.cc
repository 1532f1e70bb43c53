#include <algorithm>
#include <numeric>
#include <string>

#include "check.h"
#include "collectives/local.h"
#include "collectives/ring.h"
#include "collectives/tree.h"
#include "ranks.h"

namespace keras_ring {
namespace {

using check::Note;
using Sizes = std::vector<std::int64_t>;

const std::vector<int> kCounts = {1, 2, 3, 4, 5, 8};
constexpr bool kIsLocal[] = {false, true};

std::vector<char> Block(int rank, int size, std::int64_t bytes) {
  std::vector<char> block(bytes);
  for (std::int64_t j = 0; j < bytes; ++j) block[j] = static_cast<char>(Value(rank, size, j) * 31);
  return block;
}

void Allgather(const Routes& routes, bool is_local, const void* input, const Sizes& block_bytes,
               void* output) {
  if (is_local) return LocalAllgather(routes.local, input, block_bytes, output);
  RingAllgather(routes.world, input, block_bytes, output);
}

void Broadcast(const Routes& routes, bool is_local, int root, void* data, std::int64_t bytes) {
  if (is_local) return LocalBroadcast(routes.local, root, data, bytes);
  TreeBroadcast(routes.world, root, data, bytes);
}

void CheckAllgather(const Sizes& block_bytes, Sends sends, bool is_local, bool in_place) {
  const int size = static_cast<int>(block_bytes.size());
  std::vector<char> wanted;
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<char> block = Block(rank, size, block_bytes[rank]);
    wanted.insert(wanted.end(), block.begin(), block.end());
  }
  RunRanks(Ranks(size, sends), [&](const Routes& routes) {
    const int rank = routes.world.rank();
    const Note note("blocks ", block_bytes, ", rank ", rank, is_local ? ", local" : ", ring",
                    in_place ? ", in place" : "");
    const std::vector<char> input = Block(rank, size, block_bytes[rank]);
    std::vector<char> output(wanted.size(), 0);
    char* const own = output.data() + std::accumulate(block_bytes.begin(),
                                                      block_bytes.begin() + rank, std::int64_t{0});
    if (in_place) std::copy(input.begin(), input.end(), own);
    Allgather(routes, is_local, in_place ? own : input.data(), block_bytes, output.data());
    CHECK(output == wanted);
  });
}

TEST("allgather: equal, unequal and empty blocks, in the order of the ranks") {
  const std::vector<Sizes> cases = {{5},
                                    {0},
                                    {3, 3},
                                    {0, 7},
                                    {7, 0},
                                    {0, 0, 0},
                                    {1, 0, 1000},
                                    {64, 64, 64},
                                    {65, 0, 63},
                                    {97, 96, 95, 192},
                                    {0, 0, 1, 0},
                                    {9, 8, 7, 6, 5},
                                    {0, 1, 2, 3, 4, 5, 6, 700}};
  for (const Sizes& block_bytes : cases) {
    for (const bool in_place : {false, true}) {
      CheckAllgather(block_bytes, Sends::kAtOnce, /*is_local=*/false, in_place);
      CheckAllgather(block_bytes, Sends::kLate, /*is_local=*/false, in_place);
      CheckAllgather(block_bytes, Sends::kAtOnce, /*is_local=*/true, in_place);
    }
  }
}

TEST("broadcast: from each root to 1 to 5 and 8 ranks, empty to many segments") {
  for (const int size : kCounts) {
    for (int root = 0; root < size; ++root) {
      for (const std::int64_t bytes : {0, 1, 63, 64, 65, 97, 1009}) {
        for (const bool is_local : kIsLocal) {
          const Sends sends = bytes > 64 ? Sends::kLate : Sends::kAtOnce;
          RunRanks(Ranks(size, sends), [&](const Routes& routes) {
            const Note note(size, " ranks, root ", root, ", ", bytes, " bytes, rank ",
                            routes.world.rank(), is_local ? ", local" : ", tree");
            std::vector<char> data = Block(routes.world.rank(), size, bytes);
            Broadcast(routes, is_local, root, data.data(), bytes);
            CHECK(data == Block(root, size, bytes));
          });
        }
      }
    }
  }
}

void RunManyInARow(const Routes& routes, bool is_local) {
  const int rank = routes.world.rank();
  for (std::int64_t i = 0; i < 50; ++i) {
    const std::int64_t elems = 1 + i * 7;
    std::vector<std::int64_t> values(elems, rank + i);
    Bucket bucket;
    bucket.dtype = DType::kInt64;
    bucket.tensors = {{values.data(), values.data(), elems, i}};
    if (is_local) {
      LocalAllreduce(routes.local, bucket);
    } else {
      RingAllreduce(routes.world, bucket);
    }
    CHECK_EQ(values, std::vector<std::int64_t>(elems, 6 + 4 * i));
    values.assign(elems, rank);
    Broadcast(routes, is_local, static_cast<int>(i % 4), values.data(), 8 * elems);
    CHECK_EQ(values, std::vector<std::int64_t>(elems, i % 4));
    Sizes all(4);
    const std::int64_t own = rank * 100 + i;
    Allgather(routes, is_local, &own, {8, 8, 8, 8}, all.data());
    CHECK_EQ(all, (Sizes{i, 100 + i, 200 + i, 300 + i}));
  }
}

TEST("collectives that follow each other do not take each other's messages or slots") {
  for (const bool is_local : kIsLocal) {
    for (const Sends sends : {Sends::kAtOnce, Sends::kLate}) {
      RunRanks(Ranks(4, sends), [&](const Routes& routes) { RunManyInARow(routes, is_local); });
    }
  }
}

TEST("collectives over messages and in shared memory may alternate") {
  RunRanks(Ranks(4), [](const Routes& routes) {
    for (int i = 0; i < 3; ++i) {
      RunManyInARow(routes, /*is_local=*/true);
      RunManyInARow(routes, /*is_local=*/false);
    }
  });
}

TEST("a wire of some of the ranks leads to these ranks alone") {
  RunRanks(Ranks(5), [](const Routes& routes) {
    Wire odd = routes.world;
    odd.members = {1, 3};
    Wire even = routes.world;
    even.members = {0, 2, 4};
    const int rank = routes.world.rank();
    const Wire& own = rank % 2 == 1 ? odd : even;
    CHECK_EQ(own.rank(), rank / 2);
    std::vector<std::int32_t> values(100, rank);
    Bucket bucket;
    bucket.dtype = DType::kInt32;
    bucket.tensors = {{values.data(), values.data(), 100, 0}};
    RingAllreduce(own, bucket);
    CHECK_EQ(values, std::vector<std::int32_t>(100, rank % 2 == 1 ? 4 : 6));
    values.assign(100, rank);
    TreeBroadcast(own, 1, values.data(), 400);
    CHECK_EQ(values, std::vector<std::int32_t>(100, rank % 2 == 1 ? 3 : 2));
  });
}

}  // namespace
}  // namespace keras_ring
