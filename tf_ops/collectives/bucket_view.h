// A bucket seen as one chunk per rank: finds the memory behind a segment of a chunk.
#ifndef KERAS_RING_COLLECTIVES_BUCKET_VIEW_H_
#define KERAS_RING_COLLECTIVES_BUCKET_VIEW_H_

#include <cstdint>
#include <vector>

#include "collectives/ring.h"
#include "collectives/schedule.h"

namespace keras_ring {

class BucketView {
 public:
  // A run of elements of one tensor inside a segment.
  struct Span {
    const char* input = nullptr;
    char* output = nullptr;
    std::int64_t elems = 0;
    std::int64_t offset = 0;  // within the segment, in elements
  };

  // The bucket must outlive the view.
  BucketView(const Bucket& bucket, int num_chunks);

  // Elements of the largest chunk.
  std::int64_t max_chunk_elems() const { return max_chunk_elems_; }

  // The part of `segment` (in elements of the chunk) that `chunk` really has.
  Range Clip(int chunk, Range segment) const;

  // The memory of a clipped segment, in order.
  std::vector<Span> Spans(int chunk, Range segment) const;

 private:
  struct Piece {
    const BucketTensor* tensor = nullptr;
    Range range;              // of the tensor
    std::int64_t offset = 0;  // within the chunk
  };

  const std::int64_t elem_bytes_;
  std::vector<std::vector<Piece>> chunks_;
  std::vector<std::int64_t> chunk_elems_;
  std::int64_t max_chunk_elems_ = 0;
};

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_BUCKET_VIEW_H_
