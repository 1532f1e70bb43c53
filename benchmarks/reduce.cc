// Measures the arithmetic alone, in GB/s of memory read and written, one line for each dtype.
//
//   reduce_bench [LEVEL [KIB]]
//
// LEVEL: of the processor, as reduce/level.h names them; by default the best. KIB: of a tensor; the
// default stays in a second-level cache, like the segments that the collectives work on.
#include "reduce/reduce.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "reduce/level.h"

namespace {

using keras_ring::DType;
using keras_ring::Format;
using keras_ring::ReduceOp;
using keras_ring::Scale;

// Aligned as tensors and slots are.
struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

Memory Allocate(std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  auto* const memory =
      static_cast<char*>(std::aligned_alloc(kLine, (bytes + kLine - 1) / kLine * kLine));
  if (memory == nullptr) std::abort();
  std::memset(memory, 1, bytes);
  return Memory(memory);
}

// The best of many runs: what else happens on the machine only ever adds.
template <typename Run>
double Seconds(const Run& run) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  const auto end = Clock::now() + std::chrono::milliseconds(20);
  for (auto start = Clock::now(); start < end;) {
    run();
    const auto now = Clock::now();
    best = std::min(best, std::chrono::duration<double>(now - start).count());
    start = now;
  }
  return best;
}

void Measure(DType dtype, std::size_t bytes) {
  const std::size_t elem = keras_ring::DTypeBytes(dtype);
  const std::size_t wide = keras_ring::AccumulatorBytes(dtype);
  const std::size_t elems = bytes / elem;
  const Memory a = Allocate(elems * elem);
  const Memory b = Allocate(elems * elem);
  const Memory sums = Allocate(elems * wide);
  const Memory to = Allocate(elems * elem);
  // No subnormals and no overflow, which can be slow: ones where the type is made of float32.
  const std::vector<float> ones(elems * wide / sizeof(float), 1.0f);
  const bool is_single = AccumulatorDType(dtype) == DType::kFloat32 || dtype == DType::kComplex64;
  if (is_single) {
    ScaleTo(dtype, Format::kAccumulator, ones.data(), Scale{}, a.get(), elems);
    ScaleTo(dtype, Format::kAccumulator, ones.data(), Scale{}, b.get(), elems);
  }
  const auto print = [&](std::size_t moved, double seconds) {
    std::printf(" %7.1f", static_cast<double>(moved) / seconds / 1e9);
  };
  std::printf("%-10s", DTypeName(dtype));
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kProduct}) {
    if (!IsReducible(dtype, op)) {
      std::printf("       -");
      continue;
    }
    print(elems * (2 * elem + wide), Seconds([&] {
            Combine(dtype, op, Format::kTensor, a.get(), b.get(), Scale{}, sums.get(), elems);
          }));
  }
  const ReduceOp op = dtype == DType::kBool ? ReduceOp::kMax : ReduceOp::kSum;
  print(elems * (elem + 2 * wide), Seconds([&] {
          Combine(dtype, op, Format::kAccumulator, sums.get(), b.get(), Scale{}, sums.get(), elems);
        }));
  if (is_single) std::memcpy(sums.get(), ones.data(), elems * wide);
  for (const std::int64_t divisor : {1, 2, 3}) {
    print(elems * (elem + wide), Seconds([&] {
            ScaleTo(dtype, Format::kAccumulator, sums.get(), Scale{1.0, divisor}, to.get(), elems);
          }));
  }
  for (const std::int64_t divisor : {1, 2}) {
    const std::vector<const void*> sources = {a.get(), b.get()};
    print(elems * 3 * elem, Seconds([&] {
            Reduce(dtype, op, sources, Scale{}, Scale{1.0, divisor}, to.get(), elems);
          }));
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    const auto levels = keras_ring::SupportedLevels();
    const auto level = std::find_if(levels.begin(), levels.end(), [argv](keras_ring::Level one) {
      return std::strcmp(LevelName(one), argv[1]) == 0;
    });
    if (level == levels.end()) {
      std::fprintf(stderr, "this processor has no level '%s'\n", argv[1]);
      return EXIT_FAILURE;
    }
    keras_ring::ForceLevel(*level);
  }
  std::printf("level %s\n", LevelName(keras_ring::CurrentLevel()));
  const std::size_t bytes = 1024 * (argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 256);
  std::printf("%-10s %7s %7s %7s %7s %7s %7s %7s %7s %7s\n", "GB/s", "sum", "max", "product",
              "sum+=", "cast", "mean/2", "mean/3", "reduce", "red./2");
  for (const DType dtype : keras_ring::kAllDTypes) Measure(dtype, bytes);
  return EXIT_SUCCESS;
}
