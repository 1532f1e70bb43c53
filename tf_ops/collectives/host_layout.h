// How a bucket is cut between hosts: into one chunk for each host in each lane, and those into
// windows that lie in the slots of a host's ranks.
#ifndef KERAS_RING_COLLECTIVES_HOST_LAYOUT_H_
#define KERAS_RING_COLLECTIVES_HOST_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "collectives/bucket_view.h"
#include "collectives/ring.h"
#include "collectives/schedule.h"

namespace keras_ring {

// A window has a segment of every chunk, those of one lane beside each other. Like the flat ring's,
// chunks are made of each tensor's pieces, so that the order in which hosts are added depends on
// nothing else.
class HostLayout {
 public:
  using Span = BucketView::Span;

  // The slots have room for an element of every chunk.
  HostLayout(const Bucket& bucket, int num_hosts, int num_lanes, std::size_t slot_bytes)
      : num_hosts_(num_hosts),
        num_chunks_(num_hosts * num_lanes),
        view_(bucket, num_chunks_),
        elem_bytes_(static_cast<std::int64_t>(DTypeBytes(bucket.dtype))),
        most_elems_(static_cast<std::int64_t>(slot_bytes) / elem_bytes_ / num_chunks_) {
    // Some windows at least, so that all stages work beside each other, but no message so small
    // that it costs more than its data.
    const std::int64_t least = std::min(most_elems_, kLeastSegmentBytes / elem_bytes_);
    segment_elems_ = std::clamp(view_.max_chunk_elems() / kLeastWindows, least, most_elems_);
  }

  std::int64_t num_windows() const {
    return (view_.max_chunk_elems() + segment_elems_ - 1) / segment_elems_;
  }
  int num_chunks() const { return num_chunks_; }
  std::int64_t segment_elems() const { return segment_elems_; }
  // Of an element of a tensor.
  std::int64_t elem_bytes() const { return elem_bytes_; }
  // Chunks are numbered lane by lane. The sums of a chunk begin with those of its host.
  int LaneOf(int chunk) const { return chunk / num_hosts_; }
  int HostOf(int chunk) const { return chunk % num_hosts_; }
  int ChunkOf(int lane, int host) const { return lane * num_hosts_ + host; }
  // Of a chunk's segment in the slot, in elements.
  std::int64_t Begin(int chunk) const { return chunk * segment_elems_; }
  std::int64_t Elems(std::int64_t window, int chunk) const {
    return Segment(window, chunk).elems();
  }
  // Offsets from the slot's beginning.
  std::vector<Span> Spans(std::int64_t window, int chunk) const {
    auto spans = view_.Spans(chunk, Segment(window, chunk));
    for (Span& span : spans) span.offset += Begin(chunk);
    return spans;
  }

 private:
  static constexpr std::int64_t kLeastWindows = 8;
  static constexpr std::int64_t kLeastSegmentBytes = 32 * 1024;

  Range Segment(std::int64_t window, int chunk) const {
    return view_.Clip(chunk, Range{window * segment_elems_, (window + 1) * segment_elems_});
  }

  const int num_hosts_;
  const int num_chunks_;
  const BucketView view_;
  const std::int64_t elem_bytes_;
  const std::int64_t most_elems_;
  std::int64_t segment_elems_ = 0;
};

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_HOST_LAYOUT_H_
