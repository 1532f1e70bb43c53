#include "collectives/adasum.h"

#include <cmath>
#include <complex>

#include "check.h"
#include "dtypes.h"
#include "ranks.h"
#include "reduce/blend.h"

namespace keras_ring {
namespace {

using check::Note;
using Vector = std::vector<double>;

Vector Pair(const Vector& a, const Vector& b) {
  double ab = 0;
  double aa = 0;
  double bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  Vector result(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    result[i] = (aa == 0 ? 1 : 1 - ab / (2 * aa)) * a[i] + (bb == 0 ? 1 : 1 - ab / (2 * bb)) * b[i];
  }
  return result;
}

// The tree as the header describes it.
Vector Reference(std::vector<Vector> ranks) {
  std::size_t trees = 1;
  while (2 * trees <= ranks.size()) trees *= 2;
  const std::size_t pairs = ranks.size() - trees;
  std::vector<Vector> level;
  for (std::size_t i = 0; i < pairs; ++i) level.push_back(Pair(ranks[2 * i], ranks[2 * i + 1]));
  level.insert(level.end(), ranks.begin() + static_cast<std::ptrdiff_t>(2 * pairs), ranks.end());
  while (level.size() > 1) {
    std::vector<Vector> next;
    for (std::size_t i = 0; i < level.size(); i += 2) next.push_back(Pair(level[i], level[i + 1]));
    level = next;
  }
  return level[0];
}

// Directions that neither agree nor are orthogonal.
double Input(int rank, std::int64_t element, std::size_t tensor) {
  return std::sin(1.0 + 3.7 * rank + 0.9 * static_cast<double>(element)) +
         0.2 * static_cast<double>(tensor);
}

template <typename T>
void CheckAdasum(int size, DType dtype, const std::vector<std::int64_t>& sizes, double tolerance,
                 Sends sends = Sends::kAtOnce) {
  std::vector<std::vector<std::vector<T>>> results(size);
  RunRanks(Ranks(size, sends), [&](const Routes& routes) {
    const int rank = routes.world.rank();
    std::vector<std::vector<T>> inputs;
    auto& outputs = results[rank];
    Bucket bucket;
    bucket.dtype = dtype;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      inputs.emplace_back();
      for (std::int64_t j = 0; j < sizes[i]; ++j) {
        inputs[i].push_back(static_cast<T>(static_cast<float>(Input(rank, j, i))));
      }
      outputs.emplace_back(sizes[i]);
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      bucket.tensors.push_back({inputs[i].data(), outputs[i].data(), sizes[i], 3});
    }
    Adasum(routes.world, bucket);
  });
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::vector<Vector> inputs(size);
    for (int rank = 0; rank < size; ++rank) {
      for (std::int64_t j = 0; j < sizes[i]; ++j) {
        const T value = static_cast<T>(static_cast<float>(Input(rank, j, i)));
        inputs[rank].push_back(static_cast<double>(static_cast<float>(value)));
      }
    }
    const Vector wanted = Reference(inputs);
    for (int rank = 0; rank < size; ++rank) {
      const Note note(size, " ranks, ", DTypeName(dtype), ", tensor ", i, " of ", sizes[i],
                      ", rank ", rank);
      if (sizes[i] == 0) continue;
      CHECK(std::memcmp(results[rank][i].data(), results[0][i].data(), sizes[i] * sizeof(T)) == 0);
      for (std::int64_t j = 0; j < sizes[i]; ++j) {
        const double got = static_cast<double>(static_cast<float>(results[rank][i][j]));
        CHECK(std::fabs(got - wanted[j]) <= tolerance * (1 + std::fabs(wanted[j])));
      }
    }
  }
}

TEST("adasum: 1 to 9 ranks, tensors of 0 to many elements, each with dot products of its own") {
  for (int size = 1; size <= 9; ++size) {
    for (const Sends sends : {Sends::kAtOnce, Sends::kLate}) {
      CheckAdasum<float>(size, DType::kFloat32, {1}, 1e-5, sends);
      CheckAdasum<float>(size, DType::kFloat32, {0, 5, 1, 211, 2, 33}, 1e-5, sends);
    }
  }
}

TEST("adasum: every floating dtype, rounded once to it") {
  for (const int size : {2, 3, 4}) {
    CheckAdasum<double>(size, DType::kFloat64, {7, 100}, 1e-6);
    CheckAdasum<Float16>(size, DType::kFloat16, {7, 100}, 1.0 / 1024);
    CheckAdasum<Bfloat16>(size, DType::kBfloat16, {7, 100}, 1.0 / 128);
  }
}

TEST("adasum: orthogonal vectors add up, equal ones average, zeros add nothing") {
  RunRanks(Ranks(4), [](const Routes& routes) {
    const int rank = routes.world.rank();
    std::vector<double> orthogonal(4, 0.0);
    orthogonal[rank] = 1.0 + rank;
    std::vector<double> equal = {0.5, -2.0, 0.0};
    std::vector<double> only_last(3, rank == 3 ? 2.5 : 0.0);
    Bucket bucket;
    bucket.dtype = DType::kFloat64;
    for (auto* const values : {&orthogonal, &equal, &only_last}) {
      bucket.tensors.push_back(
          {values->data(), values->data(), static_cast<std::int64_t>(values->size()), 0});
    }
    Adasum(routes.world, bucket);
    CHECK_EQ(orthogonal, (std::vector<double>{1, 2, 3, 4}));
    CHECK_EQ(equal, (std::vector<double>{0.5, -2.0, 0.0}));
    CHECK_EQ(only_last, std::vector<double>(3, 2.5));
  });
}

TEST("adasum: a complex vector counts as its real and imaginary parts") {
  RunRanks(Ranks(2), [](const Routes& routes) {
    const std::vector<std::complex<float>> inputs = {{1, 2}, {3, -1}};
    std::complex<float> value = inputs[routes.world.rank()];
    Bucket bucket;
    bucket.dtype = DType::kComplex64;
    bucket.tensors = {{&value, &value, 1, 0}};
    Adasum(routes.world, bucket);
    const Vector wanted = Pair({1, 2}, {3, -1});
    CHECK(std::abs(value - std::complex<float>(static_cast<float>(wanted[0]),
                                               static_cast<float>(wanted[1]))) < 1e-5f);
  });
}

TEST("adasum: factors apply before and after, and ranks outside the wire are left alone") {
  RunRanks(Ranks(4), [](const Routes& routes) {
    const int rank = routes.world.rank();
    if (rank == 2) return;
    Wire own = routes.world;
    own.members = {0, 1, 3};
    std::vector<double> values = {1.0 + rank, 2.0, -1.0 * rank};
    Bucket bucket;
    bucket.dtype = DType::kFloat64;
    bucket.before.factor = 0.5;
    bucket.after.factor = 3.0;
    bucket.tensors = {{values.data(), values.data(), 3, 0}};
    Adasum(own, bucket);
    std::vector<Vector> inputs;
    for (const double r : {0.0, 1.0, 3.0}) inputs.push_back({(1 + r) / 2, 1.0, -r / 2});
    const Vector wanted = Reference(inputs);
    for (int j = 0; j < 3; ++j) CHECK(std::fabs(values[j] - 3 * wanted[j]) < 1e-12);
  });
}

TEST("dot products are in float64: what float32 would lose stays") {
  const std::vector<float> a = {1e7f, 1.0f, 1.0f};
  const std::vector<float> b = {1.0f, 0.5f, -1e7f};
  const Dots dots = DotsOf(DType::kFloat32, a.data(), b.data(), 3);
  CHECK_EQ(dots.ab, 0.5);
  CHECK_EQ(dots.aa, 1e14 + 2);
  CHECK_EQ(dots.bb, 1e14 + 1.25);
  CHECK(IsBlendable(DType::kBfloat16));
  CHECK(!IsBlendable(DType::kInt32));
  CHECK(!IsBlendable(DType::kBool));
}

}  // namespace
}  // namespace keras_ring
