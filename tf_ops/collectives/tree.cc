#include "collectives/tree.h"

#include <algorithm>
#include <deque>

#include "collectives/schedule.h"

namespace keras_ring {
namespace {

// Receives posted ahead, and segments that may be leaving at once.
constexpr std::size_t kWindow = 4;

}  // namespace

void TreeBroadcast(const Wire& wire, int root, void* data, std::int64_t bytes) {
  TreeLinks links = BroadcastTree(wire.rank(), wire.size(), root);
  if (links.parent >= 0) links.parent = wire.peer(links.parent);
  for (int& child : links.children) child = wire.peer(child);
  char* const begin = static_cast<char*>(data);
  const std::int64_t num_segments = (bytes + wire.segment_bytes - 1) / wire.segment_bytes;
  const auto segment_at = [&](std::int64_t i) { return begin + i * wire.segment_bytes; };
  const auto bytes_of = [&](std::int64_t i) {
    return static_cast<std::size_t>(std::min(wire.segment_bytes, bytes - i * wire.segment_bytes));
  };
  std::deque<Transport::Transfer> recvs;
  std::deque<Transport::Transfer> sends;
  std::int64_t posted = 0;
  for (std::int64_t i = 0; i < num_segments; ++i) {
    if (links.parent >= 0) {
      for (; posted < num_segments && recvs.size() < kWindow; ++posted) {
        recvs.push_back(wire.transport->Recv(links.parent, segment_at(posted), bytes_of(posted)));
      }
      wire.transport->Wait(recvs.front(), wire.idle);
      recvs.pop_front();
    }
    for (const int child : links.children) {
      sends.push_back(wire.transport->Send(child, segment_at(i), bytes_of(i)));
    }
    for (; sends.size() > kWindow * links.children.size(); sends.pop_front()) {
      wire.transport->Wait(sends.front(), wire.idle);
    }
  }
  for (const Transport::Transfer send : sends) wire.transport->Wait(send, wire.idle);
}

}  // namespace keras_ring
