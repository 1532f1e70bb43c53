#include "reduce/reduce.h"

#include <algorithm>
#include <complex>

#include "reduce/ieee_mode.h"
#include "reduce/kernels.h"

namespace keras_ring {

const char* ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
  }
  return "unknown";
}

bool IsReducible(DType dtype, ReduceOp op) {
  const bool is_order = op == ReduceOp::kMin || op == ReduceOp::kMax;
  if (dtype == DType::kBool) return is_order;
  return !(IsComplex(dtype) && is_order);
}

void Combine(DType dtype, ReduceOp op, Format partial_format, const void* partial, const void* own,
             const Scale& scale, void* to, std::size_t elems) {
  const IeeeMode mode;
  CurrentKernels().combine(dtype, op, partial_format, partial, own, scale, to, elems);
}

void Widen(DType dtype, const void* from, const Scale& scale, void* to, std::size_t elems) {
  const IeeeMode mode;
  CurrentKernels().widen(dtype, from, scale, to, elems);
}

void ScaleTo(DType dtype, Format from_format, const void* from, const Scale& scale, void* to,
             std::size_t elems) {
  const IeeeMode mode;
  CurrentKernels().scale_to(dtype, from_format, from, scale, to, elems);
}

void ReduceToAccumulators(DType dtype, ReduceOp op, const std::vector<const void*>& sources,
                          const Scale& before, void* to, std::size_t elems) {
  // Two operands at once where that saves a pass.
  std::size_t next = 1;
  if (sources.size() > 1 && before.is_identity()) {
    Combine(dtype, op, Format::kTensor, sources[0], sources[1], before, to, elems);
    next = 2;
  } else {
    Widen(dtype, sources[0], before, to, elems);
  }
  for (; next < sources.size(); ++next) {
    Combine(dtype, op, Format::kAccumulator, to, sources[next], before, to, elems);
  }
}

void Reduce(DType dtype, ReduceOp op, const std::vector<const void*>& sources, const Scale& before,
            const Scale& after, void* to, std::size_t elems) {
  if (AccumulatorDType(dtype) == dtype && after.is_identity()) {
    return ReduceToAccumulators(dtype, op, sources, before, to, elems);
  }
  // A block and its partial result stay in the first-level cache between the passes over them.
  constexpr std::size_t kBlock = 1024;
  alignas(64) char partial[kBlock * sizeof(std::complex<double>)];
  const std::size_t elem_bytes = DTypeBytes(dtype);
  std::vector<const void*> block_sources(sources.size());
  for (std::size_t begin = 0; begin < elems; begin += kBlock) {
    const std::size_t block = std::min(kBlock, elems - begin);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      block_sources[i] = static_cast<const char*>(sources[i]) + begin * elem_bytes;
    }
    ReduceToAccumulators(dtype, op, block_sources, before, partial, block);
    ScaleTo(dtype, Format::kAccumulator, partial, after,
            static_cast<char*>(to) + begin * elem_bytes, block);
  }
}

}  // namespace keras_ring
