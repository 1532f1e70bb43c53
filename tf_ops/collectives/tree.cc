#include "collectives/tree.h"

#include <algorithm>

namespace keras_ring {
namespace {

// Receives posted ahead, and segments that may be leaving at once.
constexpr std::size_t kWindow = 4;

}  // namespace

TreeBroadcaster::TreeBroadcaster(const Wire& wire, int root, void* data, std::int64_t bytes)
    : wire_(wire),
      links_(BroadcastTree(wire.rank(), wire.size(), root)),
      data_(static_cast<char*>(data)),
      bytes_(bytes),
      num_segments_((bytes + wire.segment_bytes - 1) / wire.segment_bytes) {
  if (links_.parent >= 0) links_.parent = wire.peer(links_.parent);
  for (int& child : links_.children) child = wire.peer(child);
}

std::size_t TreeBroadcaster::BytesOf(std::int64_t index) const {
  return static_cast<std::size_t>(
      std::min(wire_.segment_bytes, bytes_ - index * wire_.segment_bytes));
}

void TreeBroadcaster::AwaitUntil(std::int64_t end) {
  for (; arrived_ * wire_.segment_bytes < std::min(end, bytes_); ++arrived_) {
    if (links_.parent >= 0) {
      for (; posted_ < num_segments_ && recvs_.size() < kWindow; ++posted_) {
        recvs_.push_back(
            wire_.transport->Recv(links_.parent, SegmentAt(posted_), BytesOf(posted_)));
      }
      wire_.transport->Wait(recvs_.front(), wire_.idle);
      recvs_.pop_front();
    }
    for (const int child : links_.children) {
      sends_.push_back(wire_.transport->Send(child, SegmentAt(arrived_), BytesOf(arrived_)));
    }
    for (; sends_.size() > kWindow * links_.children.size(); sends_.pop_front()) {
      wire_.transport->Wait(sends_.front(), wire_.idle);
    }
  }
}

void TreeBroadcaster::Finish() {
  AwaitUntil(bytes_);
  for (; !sends_.empty(); sends_.pop_front()) wire_.transport->Wait(sends_.front(), wire_.idle);
}

void TreeBroadcast(const Wire& wire, int root, void* data, std::int64_t bytes) {
  TreeBroadcaster(wire, root, data, bytes).Finish();
}

}  // namespace keras_ring
