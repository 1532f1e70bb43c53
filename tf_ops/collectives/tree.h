// Broadcast down a binary tree, in segments.
#ifndef KERAS_RING_COLLECTIVES_TREE_H_
#define KERAS_RING_COLLECTIVES_TREE_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "collectives/schedule.h"
#include "collectives/wire.h"

namespace keras_ring {

// Fills `data` on every rank with the root's; `bytes` is the same everywhere.
// Cost: log2(P) hops; each rank sends at most 2 S bytes.
// Source: Sanders, Speck & Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and
// scan, Parallel Computing 2009 (section 2, the single pipelined tree).
void TreeBroadcast(const Wire& wire, int root, void* data, std::int64_t bytes);

// The same bit by bit. The wire must outlive it.
class TreeBroadcaster {
 public:
  TreeBroadcaster(const Wire& wire, int root, void* data, std::int64_t bytes);

  // Waits until the first `end` bytes are here and on their way to others.
  void AwaitUntil(std::int64_t end);
  // Waits until everything is here and has left.
  void Finish();

 private:
  char* SegmentAt(std::int64_t index) const { return data_ + index * wire_.segment_bytes; }
  std::size_t BytesOf(std::int64_t index) const;

  const Wire& wire_;
  TreeLinks links_;
  char* const data_;
  const std::int64_t bytes_;
  const std::int64_t num_segments_;
  std::int64_t posted_ = 0;   // receives
  std::int64_t arrived_ = 0;  // segments
  std::deque<Transport::Transfer> recvs_;
  std::deque<Transport::Transfer> sends_;
};

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_TREE_H_
