// Alltoall and reducescatter, each over messages and in the memory of one host under one suite.
#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "check.h"
#include "collectives/local_parts.h"
#include "collectives/pairwise.h"
#include "collectives/reducescatter.h"
#include "collectives/schedule.h"
#include "dtypes.h"
#include "ranks.h"

namespace keras_ring {
namespace {

using check::Note;
using Sizes = std::vector<std::int64_t>;
using Matrix = std::vector<Sizes>;  // bytes, by sender and receiver

const std::vector<int> kCounts = {1, 2, 3, 4, 5, 8};
constexpr bool kIsLocal[] = {false, true};

char ByteOf(int from, int to, std::int64_t j) {
  return static_cast<char>(from * 89 + to * 31 + j * 7 + j / 256);
}

std::int64_t Largest(const Matrix& bytes) {
  std::int64_t largest = 0;
  for (std::size_t from = 0; from < bytes.size(); ++from) {
    for (std::size_t to = 0; to < bytes.size(); ++to) {
      if (from != to) largest = std::max(largest, bytes[from][to]);
    }
  }
  return largest;
}

void CheckAlltoall(const Matrix& bytes, Sends sends, bool is_local) {
  const int size = static_cast<int>(bytes.size());
  RunRanks(Ranks(size, sends), [&](const Routes& routes) {
    const int rank = routes.world.rank();
    const Note note(size, " ranks, rank ", rank, " sends ", bytes[rank],
                    is_local ? ", local" : ", pairwise");
    std::vector<char> input;
    std::vector<char> wanted;
    Blocks blocks;
    for (int other = 0; other < size; ++other) {
      blocks.send_bytes.push_back(bytes[rank][other]);
      blocks.recv_bytes.push_back(bytes[other][rank]);
      for (std::int64_t j = 0; j < bytes[rank][other]; ++j) {
        input.push_back(ByteOf(rank, other, j));
      }
      for (std::int64_t j = 0; j < bytes[other][rank]; ++j) {
        wanted.push_back(ByteOf(other, rank, j));
      }
    }
    std::vector<char> output(wanted.size(), 0);
    blocks.input = input.data();
    blocks.output = output.data();
    if (is_local) {
      LocalAlltoall(routes.local, blocks, Largest(bytes));
    } else {
      PairwiseAlltoall(routes.world, blocks);
    }
    CHECK(output == wanted);
  });
}

TEST("alltoall: equal, unequal and empty blocks from 1 to 5 and 8 ranks") {
  for (const int size : kCounts) {
    for (const std::int64_t scale : {0, 1, 13, 64, 131, 700}) {
      const std::vector<std::function<std::int64_t(int, int)>> laws = {
          [&](int, int) { return scale; },
          [&](int from, int to) { return scale * ((from + 2 * to) % 3); },
          [&](int from, int to) { return from == 0 ? scale + to : 0; },
          [&](int from, int to) { return to == size - 1 ? scale - from % 2 * scale : 0; }};
      for (const auto& law : laws) {
        Matrix bytes(size, Sizes(size));
        for (int from = 0; from < size; ++from) {
          for (int to = 0; to < size; ++to) bytes[from][to] = law(from, to);
        }
        CheckAlltoall(bytes, Sends::kAtOnce, /*is_local=*/true);
        CheckAlltoall(bytes, Sends::kAtOnce, /*is_local=*/false);
        CheckAlltoall(bytes, Sends::kLate, /*is_local=*/false);
      }
    }
  }
}

TEST("exchange: around a ring of three, more in one direction than in the other") {
  for (const Sends sends : {Sends::kAtOnce, Sends::kLate}) {
    RunRanks(Ranks(3, sends), [](const Routes& routes) {
      const int rank = routes.world.rank();
      const int next = (rank + 1) % 3;
      const int prev = (rank + 2) % 3;
      const Sizes bytes = {5000, 0, 200};
      std::vector<char> sent(bytes[rank], static_cast<char>(rank));
      std::vector<char> got(bytes[prev], 9);
      ExchangeBytes(routes.world, next, {sent.data(), sent.size()}, prev, {got.data(), got.size()});
      CHECK(got == std::vector<char>(bytes[prev], static_cast<char>(prev)));
    });
  }
}

// Element j of all tensors together on a rank; the sum of all ranks is exact in every dtype.
template <typename T>
T Input(ReduceOp op, int rank, int size, std::int64_t element) {
  if (op == ReduceOp::kProduct) return FromInt<T>(1 + (rank + element) % 2);
  return FromInt<T>(Value(rank, size, element) % 11);
}

struct Tensor {
  std::int64_t rows = 0;
  std::int64_t row_elems = 0;
};

void CheckReducescatter(const World& world, DType dtype, ReduceOp op,
                        const std::vector<Tensor>& tensors, bool is_local) {
  RunRanks(world, [&](const Routes& routes) {
    const int rank = routes.world.rank();
    const int size = routes.world.size();
    const Note note(size, " ranks, rank ", rank, ", ", DTypeName(dtype), " ", ReduceOpName(op),
                    ", ", tensors.size(), " tensors, the first of ", tensors[0].rows, " x ",
                    tensors[0].row_elems, is_local ? ", local" : ", ring");
    std::vector<std::vector<char>> inputs;
    std::vector<std::vector<char>> outputs;
    Bucket bucket;
    bucket.dtype = dtype;
    bucket.op = op;
    WithTypes(dtype, [&](auto storage, auto accumulator) {
      using T = decltype(storage);
      using A = decltype(accumulator);
      std::int64_t first = 0;
      for (const Tensor& tensor : tensors) {
        const std::int64_t elems = tensor.rows * tensor.row_elems;
        const Range part = PartOf(tensor.rows, size, rank);
        inputs.push_back(Bytes(elems, dtype));
        outputs.push_back(Bytes(part.elems() * tensor.row_elems, dtype));
        for (std::int64_t j = 0; j < elems; ++j) {
          Store(&inputs.back(), j, Input<T>(op, rank, size, first + j));
        }
        first += elems;
      }
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        AddRows(inputs[i].data(), tensors[i].rows, tensors[i].row_elems, rank, size,
                outputs[i].data(), &bucket);
      }
      if (is_local) {
        LocalReducescatter(routes.local, bucket);
      } else {
        RingReducescatter(routes.world, bucket);
      }
      first = 0;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const Range part = PartOf(tensors[i].rows, size, rank);
        for (std::int64_t j = 0; j < part.elems() * tensors[i].row_elems; ++j) {
          const std::int64_t element = first + part.begin * tensors[i].row_elems + j;
          A wanted = static_cast<A>(Input<T>(op, 0, size, element));
          for (int other = 1; other < size; ++other) {
            wanted = Reference(op, wanted, static_cast<A>(Input<T>(op, other, size, element)));
          }
          const Note place("tensor ", i, ", element ", j);
          CHECK_EQ(static_cast<A>(Load<T>(outputs[i], j)), static_cast<A>(static_cast<T>(wanted)));
        }
        first += tensors[i].rows * tensors[i].row_elems;
      }
    });
  });
}

TEST("reducescatter: rows that divide or not, few or many, on 1 to 5 and 8 ranks") {
  for (const int size : kCounts) {
    for (const std::int64_t rows : {0, 1, size - 1, size, size + 1, 13, 101}) {
      for (const std::int64_t row_elems : {0, 1, 7}) {
        const std::vector<Tensor> tensors = {{rows, row_elems}};
        for (const bool is_local : kIsLocal) {
          CheckReducescatter(Ranks(size), DType::kInt32, ReduceOp::kSum, tensors, is_local);
        }
        CheckReducescatter(Ranks(size, Sends::kLate), DType::kInt32, ReduceOp::kSum, tensors,
                           /*is_local=*/false);
      }
    }
  }
}

TEST("reducescatter: every dtype and operation, several tensors at once") {
  const std::vector<Tensor> tensors = {{11, 3}, {0, 5}, {2, 1}, {40, 2}};
  for (const DType dtype : kAllDTypes) {
    for (const ReduceOp op : kAllOps) {
      if (!IsReducible(dtype, op)) continue;
      for (const int size : {2, 3, 5}) {
        for (const bool is_local : kIsLocal) {
          CheckReducescatter(Ranks(size), dtype, op, tensors, is_local);
        }
      }
    }
  }
}

TEST("reducescatter: factors scale each input and the result once") {
  for (const bool is_local : kIsLocal) {
    for (const int size : {1, 2, 3}) {
      RunRanks(Ranks(size), [&](const Routes& routes) {
        const int rank = routes.world.rank();
        std::vector<double> input(30);
        for (int j = 0; j < 30; ++j) input[j] = j + rank;
        const Range part = PartOf(30, size, rank);
        std::vector<double> output(part.elems());
        Bucket bucket;
        bucket.dtype = DType::kFloat64;
        bucket.before.factor = 0.5;
        bucket.after = Scale{8.0, size};
        AddRows(input.data(), 30, 1, rank, size, output.data(), &bucket);
        is_local ? LocalReducescatter(routes.local, bucket)
                 : RingReducescatter(routes.world, bucket);
        for (std::int64_t j = 0; j < part.elems(); ++j) {
          const double sum = static_cast<double>(size * (part.begin + j) + size * (size - 1) / 2);
          CHECK_EQ(output[j], sum * 0.5 * 8.0 / size);
        }
      });
    }
  }
}

TEST("alltoall and reducescatter of some of the ranks lead to these ranks alone") {
  RunRanks(Ranks(5), [](const Routes& routes) {
    const int rank = routes.world.rank();
    Wire own = routes.world;
    own.members = rank % 2 == 1 ? std::vector<int>{1, 3} : std::vector<int>{0, 2, 4};
    const int size = own.size();
    std::vector<std::int32_t> input(size, rank);
    std::vector<std::int32_t> output(size, -1);
    const Sizes equal(size, 4);
    PairwiseAlltoall(own, {input.data(), equal, output.data(), equal});
    CHECK_EQ(output, std::vector<std::int32_t>(own.members.begin(), own.members.end()));
    Bucket bucket;
    bucket.dtype = DType::kInt32;
    std::int32_t sum = 0;
    AddRows(input.data(), size, 1, own.rank(), size, &sum, &bucket);
    RingReducescatter(own, bucket);
    CHECK_EQ(sum, rank % 2 == 1 ? 4 : 6);
  });
}

TEST("collectives of parts may follow each other, and allreduce, in any sizes") {
  RunRanks(Ranks(4), [](const Routes& routes) {
    const int rank = routes.world.rank();
    for (std::int64_t i = 0; i < 40; ++i) {
      const std::int64_t elems = 4 * (i * 7 % 90);
      std::vector<std::int64_t> input(elems, rank + i);
      std::vector<std::int64_t> output(elems, -1);
      const Sizes equal(4, 2 * elems);
      LocalAlltoall(routes.local, {input.data(), equal, output.data(), equal}, 2 * elems);
      for (std::int64_t j = 0; j < elems; ++j) CHECK_EQ(output[j], j / (elems / 4) + i);
      Bucket parts;
      parts.dtype = DType::kInt64;
      AddRows(input.data(), elems, 1, rank, 4, output.data(), &parts);
      LocalReducescatter(routes.local, parts);
      for (std::int64_t j = 0; j < elems / 4; ++j) CHECK_EQ(output[j], 6 + 4 * i);
      Bucket bucket;
      bucket.dtype = DType::kInt64;
      bucket.tensors = {{input.data(), input.data(), elems, i}};
      LocalAllreduce(routes.local, bucket);
      CHECK_EQ(input, std::vector<std::int64_t>(elems, 6 + 4 * i));
    }
  });
}

TEST("the steps of a reducescatter bring every rank its own chunk, sent on by who holds it") {
  for (int size = 2; size <= 9; ++size) {
    for (int rank = 0; rank < size; ++rank) {
      const auto steps = ReducescatterSteps(rank, size);
      const auto before = ReducescatterSteps((rank + size - 1) % size, size);
      CHECK_EQ(steps.size(), size - 1u);
      CHECK_EQ(steps.back().recv_chunk, rank);
      for (std::size_t i = 0; i < steps.size(); ++i) {
        CHECK_EQ(steps[i].recv_chunk, before[i].send_chunk);
        if (i > 0) CHECK_EQ(steps[i].send_chunk, steps[i - 1].recv_chunk);
      }
    }
  }
}

}  // namespace
}  // namespace keras_ring
