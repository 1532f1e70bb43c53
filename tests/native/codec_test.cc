#include "compression/codec.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "dtypes.h"
#include "engine/buckets.h"
#include "reduce/narrow.h"
#include "reference_sum.h"

namespace keras_ring {
namespace {

using check::Note;

constexpr std::uint32_t kNumBits = 1u << 16;
constexpr Compression kCodecs[] = {Compression::kFp16, Compression::kBf16};

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64;

// What a value is after a transfer.
template <typename T>
T Carried(Codec* codec, T value) {
  char payload[sizeof(T)];
  T carried{};
  codec->Encode(&value, 1, payload);
  codec->Decode(payload, 1, &carried);
  return carried;
}

TEST("codec: float32 and float64 have one, other dtypes travel as they are") {
  for (const DType dtype : kAllDTypes) {
    const Note note(DTypeName(dtype));
    CHECK(MakeCodec(Compression::kNone, dtype) == nullptr);
    for (const Compression compression : kCodecs) {
      const auto codec = MakeCodec(compression, dtype);
      const bool is_wide = dtype == DType::kFloat32 || dtype == DType::kFloat64;
      CHECK_EQ(codec != nullptr, is_wide);
      if (is_wide) CHECK_EQ(codec->PayloadBytes(1001), std::size_t{2002});
    }
  }
}

template <typename T, typename Half>
void CheckRoundTrip(Compression compression) {
  std::vector<T> values;
  for (std::uint32_t bits = 0; bits < kNumBits; ++bits) {
    Half half;
    half.bits = static_cast<std::uint16_t>(bits);
    const auto value = static_cast<T>(static_cast<float>(half));
    if (value == value) values.push_back(value);
  }
  const auto codec = MakeCodec(compression, kDTypeOf<T>);
  const auto elems = static_cast<std::int64_t>(values.size());
  std::vector<char> payload(codec->PayloadBytes(elems));
  std::vector<T> decoded(values.size());
  codec->Encode(values.data(), elems, payload.data());
  codec->Decode(payload.data(), elems, decoded.data());
  // Not `==`: zero has a sign.
  CHECK_EQ(std::memcmp(decoded.data(), values.data(), values.size() * sizeof(T)), 0);
}

TEST("codec: what fits in 16 bits survives, infinity and subnormals included") {
  CheckRoundTrip<float, Float16>(Compression::kFp16);
  CheckRoundTrip<double, Float16>(Compression::kFp16);
  CheckRoundTrip<float, Bfloat16>(Compression::kBf16);
  CheckRoundTrip<double, Bfloat16>(Compression::kBf16);
}

TEST("codec: float32 is rounded as float16 and bfloat16 are") {
  std::mt19937 random(3);
  const auto fp16 = MakeCodec(Compression::kFp16, DType::kFloat32);
  const auto bf16 = MakeCodec(Compression::kBf16, DType::kFloat32);
  for (int i = 0; i < 100000; ++i) {
    const float value = internal::FloatOf(static_cast<std::uint32_t>(random()));
    if (value != value) continue;
    CHECK_EQ(Carried(fp16.get(), value), static_cast<float>(Float16(value)));
    CHECK_EQ(Carried(bf16.get(), value), static_cast<float>(Bfloat16(value)));
  }
  CHECK(std::isnan(Carried(fp16.get(), std::nanf(""))));
  CHECK(std::isnan(Carried(bf16.get(), std::nanf(""))));
}

TEST("codec: beyond 65504 fp16 is infinite, bf16 is not") {
  const auto fp16 = MakeCodec(Compression::kFp16, DType::kFloat32);
  const auto bf16 = MakeCodec(Compression::kBf16, DType::kFloat32);
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK_EQ(Carried(fp16.get(), 65519.0f), 65504.0f);
  CHECK_EQ(Carried(fp16.get(), 65520.0f), infinity);
  CHECK_EQ(Carried(fp16.get(), -1e30f), -infinity);
  CHECK_EQ(Carried(bf16.get(), 65536.0f), 65536.0f);
  CHECK_EQ(Carried(bf16.get(), 1e30f), static_cast<float>(Bfloat16(1e30f)));
}

// `Half` of the nearest value, by looking at both neighbours.
template <typename Half>
void CheckNearest(DType narrow, double value) {
  Half got;
  Narrow(DType::kFloat64, &value, narrow, &got, 1);
  const auto distance = [value](std::uint32_t bits) {
    Half half;
    half.bits = static_cast<std::uint16_t>(bits);
    return std::abs(static_cast<double>(static_cast<float>(half)) - value);
  };
  const Note note("value ", value, ", bits ", got.bits);
  CHECK_EQ((got.bits & 0x8000u) != 0, std::signbit(value));
  const double own = distance(got.bits);
  for (const std::uint32_t next : {got.bits + 1u, got.bits - 1u}) {
    if ((next & 0x7fffu) == 0x7fffu) continue;  // below zero there is the other sign
    const double other = distance(next);
    CHECK(own < other || (own == other && got.bits % 2 == 0));
  }
}

TEST("codec: float64 is rounded once, not to float32 first") {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> mantissa(1, 2);
  const double least = std::ldexp(1.0, -40);
  for (const double sign : {1.0, -1.0}) {
    // A hair beside the middle between two 16-bit floats, which float32 cannot tell from it.
    for (int i = 0; i < 2000; ++i) {
      const double half_middle = 1 + (2 * static_cast<double>(random() % 1024) + 1) / 2048;
      const double bfloat_middle = 1 + (2 * static_cast<double>(random() % 128) + 1) / 256;
      for (const double hair : {-least, 0.0, least}) {
        CheckNearest<Float16>(DType::kFloat16, sign * (half_middle + hair));
        CheckNearest<Bfloat16>(DType::kBfloat16, sign * (bfloat_middle + hair));
      }
      CheckNearest<Float16>(DType::kFloat16,
                            sign * std::ldexp(mantissa(random), static_cast<int>(i % 45) - 30));
      CheckNearest<Bfloat16>(DType::kBfloat16,
                             sign * std::ldexp(mantissa(random), static_cast<int>(i % 260) - 140));
    }
  }
  const auto fp16 = MakeCodec(Compression::kFp16, DType::kFloat64);
  const auto bf16 = MakeCodec(Compression::kBf16, DType::kFloat64);
  for (Codec* const codec : {fp16.get(), bf16.get()}) {
    CHECK_EQ(Carried(codec, 1e300), std::numeric_limits<double>::infinity());
    CHECK_EQ(Carried(codec, -1e-300), 0.0);
    CHECK(std::isnan(Carried(codec, std::nan(""))));
  }
}

template <typename T>
void CheckWorld(const World& world, const World& rings, Compression compression,
                std::minstd_rand* random, bool is_flat) {
  const int size = world.topology.size();
  Bucket how;
  how.dtype = kDTypeOf<T>;
  how.after.divisor = size;
  std::vector<Brought<T>> tensors;
  std::vector<std::vector<T>> wanted;
  const auto codec = MakeCodec(compression, how.dtype);
  for (const std::int64_t elems : {std::int64_t{1}, std::int64_t{0}, std::int64_t{1201},
                                   static_cast<std::int64_t>((*random)() % 300)}) {
    tensors.push_back(RandomTensor<T>(size, elems, random));
    wanted.push_back(ReferenceSum(rings.topology, tensors.back(), size,
                                  [&](T sum) { return Carried(codec.get(), sum); }));
  }
  const auto allreduce = [&](const Routes& routes, Bucket bucket) {
    const auto own_codec = MakeCodec(compression, bucket.dtype);
    bucket.codec = own_codec.get();
    if (is_flat) return RingAllreduce(routes.world, bucket);
    HierarchicalAllreduce(routes.local, routes.between, bucket);
  };
  const Note note(CompressionName(compression), ", ", DTypeName(how.dtype));
  CheckBucket(world, how, tensors, wanted, /*in_place=*/false, allreduce);
  CheckBucket(world, how, tensors, wanted, /*in_place=*/true, allreduce);
  // Alone each has the same bits.
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    CheckBucket<T>(world, how, {tensors[i]}, {wanted[i]}, /*in_place=*/i % 2 == 0, allreduce);
  }
}

TEST(
    "ring with a codec: each transfer rounds once, on 2 to 5 ranks, fused or not, in place or "
    "not") {
  std::minstd_rand random(23);
  for (int size = 2; size <= 5; ++size) {
    const Note note(size, " ranks");
    std::vector<int> alone;
    for (int rank = 0; rank < size; ++rank) alone.push_back(rank);
    for (const Compression compression : kCodecs) {
      for (const Sends sends : {Sends::kAtOnce, Sends::kLate}) {
        CheckWorld<float>(Ranks(size, sends), Hosts(alone), compression, &random, true);
      }
      CheckWorld<double>(Ranks(size), Hosts(alone), compression, &random, true);
    }
  }
}

TEST("hierarchical with a codec: sums of a host in full, each transfer between hosts rounds once") {
  std::minstd_rand random(29);
  for (const auto& hosts : kWorlds) {
    const Note note("hosts ", hosts);
    for (const Compression compression : kCodecs) {
      World world = Hosts(hosts, Sends::kLate);
      world.slot_bytes = 16 * hosts.size() * 5;
      CheckWorld<float>(world, world, compression, &random, false);
    }
    World world = Hosts(hosts);
    world.slot_bytes = 4096;
    CheckWorld<double>(world, world, Compression::kBf16, &random, false);
  }
}

TEST("within a host nothing is rounded") {
  RunRanks(Ranks(3), [](const Routes& routes) {
    const auto codec = MakeCodec(Compression::kFp16, DType::kFloat32);
    std::vector<float> values(100, 1e5f + static_cast<float>(routes.world.rank()));
    Bucket bucket;
    bucket.codec = codec.get();
    bucket.tensors = {{values.data(), values.data(), 100, 0}};
    LocalAllreduce(routes.local, bucket);
    CHECK_EQ(values, std::vector<float>(100, 3e5f + 3));
  });
}

TEST("engine: requests of different compression share no bucket and are no match") {
  Signature plain;
  plain.kind = Kind::kAllreduce;
  plain.dtypes = {DType::kFloat32};
  plain.shapes = {{4}};
  Signature short_one = plain;
  short_one.compression = Compression::kFp16;
  Signature other = plain;
  other.compression = Compression::kBf16;
  const auto buckets = PlanBuckets({&plain, &short_one, &plain, &other, &short_one}, 1 << 20);
  CHECK_EQ(buckets.size(), std::size_t{3});
  CHECK_EQ(buckets[0], (std::vector<std::size_t>{0, 2}));
  CHECK_EQ(buckets[1], (std::vector<std::size_t>{1, 4}));
  CHECK(!(plain == short_one));
  const Difference difference = Differ(short_one, other);
  CHECK_EQ(difference.what, "compression");
  CHECK_EQ(difference.first, "fp16");
  CHECK_EQ(difference.second, "bf16");
}

}  // namespace
}  // namespace keras_ring
