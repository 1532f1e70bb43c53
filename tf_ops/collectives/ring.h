// Ring allreduce and ring allgather: optimal in bytes for any number of ranks.
//
// Words: a bucket is the tensors reduced together; each is cut into one piece per rank, and piece c
// of all tensors together is chunk c; a segment is what one message carries of a chunk.
// A tensor's pieces depend on its own size alone, never on what it is fused with, so the order of
// its additions, and with it every bit of the result, is the same in every run.
#ifndef KERAS_RING_COLLECTIVES_RING_H_
#define KERAS_RING_COLLECTIVES_RING_H_

#include <cstdint>
#include <vector>

#include "collectives/wire.h"
#include "compression/codec.h"
#include "core/dtype.h"
#include "reduce/reduce.h"

namespace keras_ring {

// A tensor of a bucket. `output` may be `input`; other overlaps are not allowed.
struct BucketTensor {
  const void* input = nullptr;
  void* output = nullptr;
  std::int64_t elems = 0;
  // The chunk that gets the first piece; spreads many tiny tensors over the ranks. The same on
  // all ranks, any value from 0 on.
  std::int64_t first_chunk = 0;
  // The tensor is one piece, which lies in first_chunk, whatever the number of ranks.
  bool is_whole = false;
};

struct Bucket {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Scale before;  // of every rank's input
  Scale after;   // of the result
  std::vector<BucketTensor> tensors;
  // Of what goes around rings; null: it goes as it is. Of the bucket's dtype. What ranks share in
  // memory is never encoded, so that a host's sum is exact.
  Codec* codec = nullptr;
};

// Every rank calls it with a bucket of the same shape; all hold the same bits afterwards.
// Cost: 2(P-1) steps; 2(P-1)/P * S bytes sent per rank, where partial sums of 16-bit floats travel
// as float32 (none on two ranks). Staging memory: a few segments, whatever the bucket's size.
// Source: Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
// JPDC 2009.
void RingAllreduce(const Wire& wire, const Bucket& bucket);

// Concatenates what the ranks bring: `output` holds block_bytes[0] bytes of rank 0, then those of
// rank 1, and so on; `input` is this rank's block. Blocks may differ in size or be empty.
// Cost: P-1 steps; the sum of the others' blocks sent and received per rank.
void RingAllgather(const Wire& wire, const void* input,
                   const std::vector<std::int64_t>& block_bytes, void* output);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_RING_H_
