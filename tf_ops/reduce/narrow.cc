#include "reduce/narrow.h"

#include <algorithm>
#include <cmath>

#include "reduce/ieee_mode.h"
#include "reduce/reduce.h"

namespace keras_ring {
namespace {

// A block of float32 on the way stays in the first-level cache.
constexpr std::int64_t kBlockElems = 1024;

// To the nearest float32 when that is exact, else to the one beside it whose last bit is set. That
// bit is below all that a 16-bit float keeps and says on which side of a tie the value lies, so
// that rounding to 16 bits afterwards is as if there had been no step between.
float RoundToOdd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value) return nearest;
  std::uint32_t bits = internal::BitsOf(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(value)) --bits;
  return internal::FloatOf(bits | 1u);
}

}  // namespace

void Narrow(DType wide, const void* from, DType narrow, void* to, std::int64_t elems) {
  if (wide == DType::kFloat32) {
    return ScaleTo(narrow, Format::kAccumulator, from, Scale{}, to, elems);
  }
  const IeeeMode mode;
  const auto* const doubles = static_cast<const double*>(from);
  alignas(64) float block[kBlockElems];
  for (std::int64_t begin = 0; begin < elems; begin += kBlockElems) {
    const std::int64_t end = std::min(begin + kBlockElems, elems);
    for (std::int64_t i = begin; i < end; ++i) block[i - begin] = RoundToOdd(doubles[i]);
    ScaleTo(narrow, Format::kAccumulator, block, Scale{},
            static_cast<char*>(to) + begin * static_cast<std::int64_t>(DTypeBytes(narrow)),
            end - begin);
  }
}

void Expand(DType narrow, const void* from, DType wide, void* to, std::int64_t elems) {
  if (wide == DType::kFloat32) return Widen(narrow, from, Scale{}, to, elems);
  auto* const doubles = static_cast<double*>(to);
  alignas(64) float block[kBlockElems];
  for (std::int64_t begin = 0; begin < elems; begin += kBlockElems) {
    const std::int64_t end = std::min(begin + kBlockElems, elems);
    Widen(narrow,
          static_cast<const char*>(from) + begin * static_cast<std::int64_t>(DTypeBytes(narrow)),
          Scale{}, block, end - begin);
    for (std::int64_t i = begin; i < end; ++i) doubles[i] = static_cast<double>(block[i - begin]);
  }
}

}  // namespace keras_ring
