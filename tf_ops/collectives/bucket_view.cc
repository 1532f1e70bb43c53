#include "collectives/bucket_view.h"

#include <algorithm>

namespace keras_ring {

BucketView::BucketView(const Bucket& bucket, int num_chunks)
    : elem_bytes_(static_cast<std::int64_t>(DTypeBytes(bucket.dtype))),
      chunks_(num_chunks),
      chunk_elems_(num_chunks, 0) {
  for (const BucketTensor& tensor : bucket.tensors) {
    const int num_pieces = tensor.is_whole ? 1 : num_chunks;
    for (int piece = 0; piece < num_pieces; ++piece) {
      const auto chunk = static_cast<int>((piece + tensor.first_chunk) % num_chunks);
      const Range range = PartOf(tensor.elems, num_pieces, piece);
      if (range.elems() == 0) break;  // and so are the pieces behind it
      chunks_[chunk].push_back(Piece{&tensor, range, chunk_elems_[chunk]});
      chunk_elems_[chunk] += range.elems();
    }
  }
  max_chunk_elems_ = *std::max_element(chunk_elems_.begin(), chunk_elems_.end());
}

Range BucketView::Clip(int chunk, Range segment) const {
  return Range{std::min(segment.begin, chunk_elems_[chunk]),
               std::min(segment.end, chunk_elems_[chunk])};
}

std::vector<BucketView::Span> BucketView::Spans(int chunk, Range segment) const {
  std::vector<Span> spans;
  if (segment.elems() == 0) return spans;
  const auto& pieces = chunks_[chunk];
  auto piece = std::upper_bound(
      pieces.begin(), pieces.end(), segment.begin,
      [](std::int64_t position, const Piece& candidate) { return position < candidate.offset; });
  for (--piece; piece != pieces.end() && piece->offset < segment.end; ++piece) {
    const std::int64_t begin = std::max(segment.begin, piece->offset);
    const std::int64_t end = std::min(segment.end, piece->offset + piece->range.elems());
    const std::int64_t byte = (piece->range.begin + begin - piece->offset) * elem_bytes_;
    spans.push_back(Span{static_cast<const char*>(piece->tensor->input) + byte,
                         static_cast<char*>(piece->tensor->output) + byte, end - begin,
                         begin - segment.begin});
  }
  return spans;
}

}  // namespace keras_ring
