#include "collectives/add_sources.h"

#include <algorithm>
#include <complex>

namespace keras_ring {
namespace {

// A block and its sums stay in the first-level cache between the passes over them.
constexpr std::int64_t kBlockElems = 1024;
constexpr std::size_t kBlockBytes = kBlockElems * sizeof(std::complex<double>);

const char* At(const void* data, std::int64_t bytes) {
  return static_cast<const char*>(data) + bytes;
}

// Calls `add(partial, sources, to, elems)` block by block.
template <typename Add>
void InBlocks(std::int64_t partial_bytes, const void* partial, std::int64_t source_bytes,
              const std::vector<const void*>& sources, std::int64_t to_bytes, void* to,
              std::int64_t elems, const Add& add) {
  std::vector<const void*> block_sources(sources.size());
  for (std::int64_t begin = 0; begin < elems; begin += kBlockElems) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      block_sources[i] = At(sources[i], begin * source_bytes);
    }
    add(At(partial, begin * partial_bytes), block_sources,
        static_cast<char*>(to) + begin * to_bytes, std::min(kBlockElems, elems - begin));
  }
}

std::int64_t Bytes(DType dtype, Format format) {
  return static_cast<std::int64_t>(format == Format::kTensor ? DTypeBytes(dtype)
                                                             : AccumulatorBytes(dtype));
}

}  // namespace

void AddSources(const Bucket& how, Format format, const void* partial,
                const std::vector<const void*>& sources, void* to, std::int64_t elems) {
  if (sources.size() == 1) {
    return Combine(how.dtype, how.op, format, partial, sources[0], how.before, to, elems);
  }
  alignas(64) char own[kBlockBytes];
  const auto add = [&](const void* block_partial, const std::vector<const void*>& block_sources,
                       void* block_to, std::int64_t block) {
    ReduceToAccumulators(how.dtype, how.op, block_sources, how.before, own, block);
    if (format == Format::kTensor) {
      Combine(how.dtype, how.op, Format::kAccumulator, own, block_partial, Scale{}, block_to,
              block);
    } else {
      Combine(AccumulatorDType(how.dtype), how.op, Format::kAccumulator, block_partial, own,
              Scale{}, block_to, block);
    }
  };
  InBlocks(Bytes(how.dtype, format), partial, Bytes(how.dtype, Format::kTensor), sources,
           Bytes(how.dtype, Format::kAccumulator), to, elems, add);
}

void AddSourcesAndScale(const Bucket& how, Format format, const void* partial,
                        const std::vector<const void*>& sources, void* to, std::int64_t elems) {
  if (AccumulatorDType(how.dtype) == how.dtype && how.after.is_identity()) {
    return AddSources(how, format, partial, sources, to, elems);
  }
  alignas(64) char sums[kBlockBytes];
  const auto add = [&](const void* block_partial, const std::vector<const void*>& block_sources,
                       void* block_to, std::int64_t block) {
    AddSources(how, format, block_partial, block_sources, sums, block);
    ScaleTo(how.dtype, Format::kAccumulator, sums, how.after, block_to, block);
  };
  InBlocks(Bytes(how.dtype, format), partial, Bytes(how.dtype, Format::kTensor), sources,
           Bytes(how.dtype, Format::kTensor), to, elems, add);
}

}  // namespace keras_ring
