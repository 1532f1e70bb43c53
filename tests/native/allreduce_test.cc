// The three ways to run an allreduce under one suite: rings of messages, the memory of one host,
// and both together.
#include <algorithm>
#include <cmath>
#include <string>

#include "check.h"
#include "collectives/hierarchical.h"
#include "collectives/local.h"
#include "collectives/ring.h"
#include "dtypes.h"
#include "ranks.h"

namespace keras_ring {
namespace {

using check::Note;
using Sizes = std::vector<std::int64_t>;

struct Way {
  Algorithm algorithm = Algorithm::kRing;
  World world;

  int size() const { return world.topology.size(); }
};

const Sizes kCounts = {1, 2, 3, 4, 5, 8};
const std::vector<std::vector<int>> kHosts = {
    {0, 0, 1, 1}, {0, 1, 1, 0},       {0, 1, 2, 0, 1, 2}, {0, 0, 0, 1, 1, 1},      {0, 1, 1, 1},
    {0, 0, 1},    {0, 0, 1, 2, 2, 2}, {0, 1, 2},          {0, 1, 2, 3, 3, 2, 1, 0}};

std::vector<Way> AllWays(Sends sends = Sends::kAtOnce) {
  std::vector<Way> ways;
  for (const std::int64_t size : kCounts) {
    ways.push_back({Algorithm::kRing, Ranks(static_cast<int>(size), sends)});
    ways.push_back({Algorithm::kLocal, Ranks(static_cast<int>(size), sends)});
  }
  for (const auto& hosts : kHosts) ways.push_back({Algorithm::kHierarchical, Hosts(hosts, sends)});
  return ways;
}

std::string Describe(const Way& way) {
  return check::Text("algorithm ", way.algorithm, " on hosts ", way.world.topology.node_of);
}

void Run(Algorithm algorithm, const Routes& routes, const Bucket& bucket) {
  switch (algorithm) {
    case Algorithm::kAuto:
    case Algorithm::kRing:
      return RingAllreduce(routes.world, bucket);
    case Algorithm::kLocal:
      return LocalAllreduce(routes.local, bucket);
    case Algorithm::kHierarchical:
      return HierarchicalAllreduce(routes.local, routes.between, bucket);
  }
}

// What tensor number `tensor` holds on a rank. The values stay so small that the sum of all ranks
// is exact in every dtype.
template <typename T>
T Input(ReduceOp op, int rank, int size, std::int64_t element, std::int64_t tensor) {
  std::int64_t value = (Value(rank, size, element) + 5 * tensor) % 11;
  if (op == ReduceOp::kProduct) value = 1 + (rank + element + tensor) % 2;
  return FromInt<T>(value);
}

template <typename T, typename A>
T Expected(ReduceOp op, int size, std::int64_t element, std::int64_t tensor) {
  A result = static_cast<A>(Input<T>(op, 0, size, element, tensor));
  for (int rank = 1; rank < size; ++rank) {
    result = Reference(op, result, static_cast<A>(Input<T>(op, rank, size, element, tensor)));
  }
  return static_cast<T>(result);
}

// A bucket of tensors of one rank, with their memory.
struct Tensors {
  std::vector<std::vector<char>> inputs;
  std::vector<std::vector<char>> outputs;
  Bucket bucket;
};

void Fill(DType dtype, ReduceOp op, const Wire& wire, const Sizes& sizes, bool in_place,
          Tensors* tensors) {
  tensors->bucket.dtype = dtype;
  tensors->bucket.op = op;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    tensors->inputs.push_back(Bytes(sizes[i], dtype));
    tensors->outputs.push_back(Bytes(in_place ? 0 : sizes[i], dtype));
    WithTypes(dtype, [&](auto storage, auto) {
      using T = decltype(storage);
      for (std::int64_t j = 0; j < sizes[i]; ++j) {
        Store(&tensors->inputs[i], j,
              Input<T>(op, wire.rank(), wire.size(), j, static_cast<std::int64_t>(i)));
      }
    });
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    auto& outputs = in_place ? tensors->inputs : tensors->outputs;
    tensors->bucket.tensors.push_back({tensors->inputs[i].data(), outputs[i].data(), sizes[i],
                                       /*first_chunk=*/static_cast<std::int64_t>(7 * i)});
  }
}

void CheckSum(const Way& way, DType dtype, ReduceOp op, const Sizes& sizes, bool in_place) {
  const std::string place =
      check::Text(Describe(way), ", ", DTypeName(dtype), " ", ReduceOpName(op), ", sizes ", sizes,
                  in_place ? ", in place" : "");
  RunRanks(way.world, [&](const Routes& routes) {
    const Note note(place, ", rank ", routes.world.rank());
    Tensors tensors;
    Fill(dtype, op, routes.world, sizes, in_place, &tensors);
    Run(way.algorithm, routes, tensors.bucket);
    WithTypes(dtype, [&](auto storage, auto accumulator) {
      using T = decltype(storage);
      using A = decltype(accumulator);
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const auto& output = in_place ? tensors.inputs[i] : tensors.outputs[i];
        for (std::int64_t j = 0; j < sizes[i]; ++j) {
          const T wanted = Expected<T, A>(op, way.size(), j, static_cast<std::int64_t>(i));
          if (std::memcmp(output.data() + j * sizeof(T), &wanted, sizeof(T)) == 0) continue;
          const Note element("tensor ", i, ", element ", j);
          CHECK_EQ(static_cast<A>(Load<T>(output, j)), static_cast<A>(wanted));
        }
      }
    });
  });
}

// Around the number of ranks, primes, and enough for many windows and segments.
Sizes ElementCounts(int size) {
  Sizes counts = {0, 1, size - 1, size, size + 1, 13, 211, 1009};
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

TEST("0 to 1009 elements, in place or not") {
  for (const Way& way : AllWays()) {
    for (const std::int64_t elems : ElementCounts(way.size())) {
      CheckSum(way, DType::kInt32, ReduceOp::kSum, {elems}, /*in_place=*/false);
      CheckSum(way, DType::kInt32, ReduceOp::kSum, {elems}, /*in_place=*/true);
    }
  }
}

TEST("every dtype and operation") {
  for (const Way& way : AllWays()) {
    for (const DType dtype : kAllDTypes) {
      for (const ReduceOp op : kAllOps) {
        if (!IsReducible(dtype, op)) continue;
        CheckSum(way, dtype, op, {97}, /*in_place=*/op == ReduceOp::kMax);
      }
    }
  }
}

TEST("fused tensors of all sizes, more of them than ranks") {
  Sizes sizes = {0, 1, 1009, 2, 3, 0, 211};
  for (int i = 0; i < 30; ++i) sizes.push_back(i % 4);
  for (const Way& way : AllWays()) {
    for (const DType dtype : {DType::kInt8, DType::kBfloat16, DType::kComplex128}) {
      CheckSum(way, dtype, ReduceOp::kSum, sizes, /*in_place=*/false);
      CheckSum(way, dtype, ReduceOp::kSum, sizes, /*in_place=*/true);
    }
  }
}

TEST("memory is not touched before a late network has read it") {
  for (const Way& way : AllWays(Sends::kLate)) {
    for (const bool in_place : {false, true}) {
      for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
        CheckSum(way, dtype, ReduceOp::kSum, {499}, in_place);
        CheckSum(way, dtype, ReduceOp::kSum, {5, 0, 211, 1, 1, 97}, in_place);
      }
    }
  }
}

TEST("a slot with room for one element, between hosts one of every rank, is enough") {
  for (const Algorithm algorithm : {Algorithm::kLocal, Algorithm::kHierarchical}) {
    Way way{algorithm, algorithm == Algorithm::kLocal ? Ranks(3) : Hosts({0, 0, 1, 1})};
    const int num_parts = algorithm == Algorithm::kLocal ? 1 : way.world.topology.size();
    way.world.slot_bytes = 16 * num_parts;
    CheckSum(way, DType::kComplex128, ReduceOp::kSum, {17}, /*in_place=*/true);
    CheckSum(way, DType::kInt8, ReduceOp::kSum, {401}, /*in_place=*/false);
  }
}

TEST("a segment smaller than an element still takes one element at a time") {
  Way way{Algorithm::kRing, Ranks(3, Sends::kLate)};
  way.world.segment_bytes = 1;
  CheckSum(way, DType::kFloat64, ReduceOp::kSum, {10}, /*in_place=*/true);
}

TEST("a bucket without tensors is no work, and others follow it") {
  for (const Way& way : AllWays()) {
    RunRanks(way.world, [&](const Routes& routes) {
      Run(way.algorithm, routes, Bucket{});
      std::vector<float> ones(100, 1.0f);
      Bucket bucket;
      bucket.tensors = {{ones.data(), ones.data(), 100, 0}};
      Run(way.algorithm, routes, bucket);
      CHECK_EQ(ones, std::vector<float>(100, static_cast<float>(way.size())));
    });
  }
}

// Float32 values whose sum depends on the order of the additions.
std::vector<float> Awkward(int rank, int size, std::int64_t elems) {
  std::vector<float> values(elems);
  for (std::int64_t j = 0; j < elems; ++j) {
    values[j] = std::sin(static_cast<float>(Value(rank, size, j))) * std::pow(10.0f, rank % 5);
  }
  return values;
}

// By rank, the sum of Awkward, fused with tensors of the given sizes before and behind.
std::vector<std::vector<float>> AwkwardSums(const Way& way, std::int64_t elems, const Sizes& before,
                                            const Sizes& behind, bool in_place) {
  const int size = way.size();
  std::vector<std::vector<float>> results(size);
  RunRanks(way.world, [&](const Routes& routes) {
    const int rank = routes.world.rank();
    std::vector<float> values = Awkward(rank, size, elems);
    std::vector<float> output(in_place ? 0 : elems);
    std::vector<std::vector<float>> others;
    Bucket bucket;
    const auto add_others = [&](const Sizes& sizes) {
      for (const std::int64_t other : sizes) {
        others.push_back(Awkward(rank + 3, size, other));
        float* data = others.back().data();
        bucket.tensors.push_back({data, data, other, other});
      }
    };
    add_others(before);
    bucket.tensors.push_back(
        {values.data(), in_place ? values.data() : output.data(), elems, /*first_chunk=*/2});
    add_others(behind);
    Run(way.algorithm, routes, bucket);
    results[rank] = in_place ? values : output;
  });
  return results;
}

TEST("all ranks hold the same bits, whatever a tensor is fused with") {
  for (const Way& way : AllWays()) {
    for (const std::int64_t elems : {1, way.size() + 1, 211, 1009}) {
      const Note note(Describe(way), ", ", elems, " elements");
      const auto alone = AwkwardSums(way, elems, {}, {}, /*in_place=*/false);
      for (const auto& bits : alone) CHECK(bits == alone[0]);
      CHECK(AwkwardSums(way, elems, {3, 100, 0}, {1}, /*in_place=*/false) == alone);
      CHECK(AwkwardSums(way, elems, {}, {17, 17, 401}, /*in_place=*/true) == alone);
    }
  }
}

TEST("prescale before, postscale and mean after the sum") {
  for (const Way& way : AllWays()) {
    const int size = way.size();
    for (const std::int64_t elems : {1, 13, 211}) {
      const Note note(Describe(way), ", ", elems, " elements");
      RunRanks(way.world, [&](const Routes& routes) {
        std::vector<double> values(elems);
        std::vector<double> wanted(elems);
        for (std::int64_t j = 0; j < elems; ++j) {
          values[j] = static_cast<double>(Value(routes.world.rank(), size, j) * size);
          // The sum over r of (j * size + r) * size / 4, times 8, over size.
          wanted[j] = static_cast<double>(2 * (size * size * j + size * (size - 1) / 2));
        }
        Bucket bucket;
        bucket.dtype = DType::kFloat64;
        bucket.before.factor = 0.25;
        bucket.after = Scale{8.0, size};
        bucket.tensors = {{values.data(), values.data(), elems, 1}};
        Run(way.algorithm, routes, bucket);
        CHECK_EQ(values, wanted);
      });
    }
  }
}

TEST("a mean of integers is the floor of sum over size") {
  for (const Way& way : AllWays()) {
    const int size = way.size();
    const Note note(Describe(way));
    RunRanks(way.world, [&](const Routes& routes) {
      const int rank = routes.world.rank();
      std::vector<std::int32_t> values = {-1 - rank, rank, -7, 1};
      Bucket bucket;
      bucket.dtype = DType::kInt32;
      bucket.after.divisor = size;
      bucket.tensors = {{values.data(), values.data(), 4, 0}};
      Run(way.algorithm, routes, bucket);
      const auto mean = [&](double sum) { return static_cast<int>(std::floor(sum / size)); };
      const int pairs = size * (size - 1) / 2;
      CHECK_EQ(values, (std::vector<std::int32_t>{mean(-size - pairs), mean(pairs), -7, 1}));
    });
  }
}

TEST("the mean of large float16 values does not overflow on the way") {
  for (const Way& way : AllWays()) {
    const Note note(Describe(way));
    RunRanks(way.world, [&](const Routes& routes) {
      std::vector<Float16> values(100, Float16(60000.0f));
      Bucket bucket;
      bucket.dtype = DType::kFloat16;
      bucket.after.divisor = way.size();
      bucket.tensors = {{values.data(), values.data(), 100, 0}};
      Run(way.algorithm, routes, bucket);
      for (const Float16 value : values) CHECK_EQ(static_cast<float>(value), 60000.0f);
    });
  }
}

TEST("a rank that fails ends the wait of the others") {
  for (const Way& way : AllWays()) {
    if (way.size() == 1) continue;
    std::string failure;
    try {
      RunRanks(way.world, [&](const Routes& routes) {
        if (routes.world.rank() == 1) throw Error(Code::kInternal, "no memory");
        std::vector<float> values(1000, 1.0f);
        Bucket bucket;
        bucket.tensors = {{values.data(), values.data(), 1000, 0}};
        Run(way.algorithm, routes, bucket);
      });
    } catch (const Error& error) {
      failure = error.what();
    }
    CHECK_EQ(failure, "no memory");
  }
}

}  // namespace
}  // namespace keras_ring
