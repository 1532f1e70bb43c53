// What a collective is run over: the transport, the way to wait, the ranks that take part, and the
// size of a message.
#ifndef KERAS_RING_COLLECTIVES_WIRE_H_
#define KERAS_RING_COLLECTIVES_WIRE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/stages.h"
#include "transport/transport.h"

namespace keras_ring {

// A collective numbers its members from 0; only peer() leads back to ranks of the transport.
struct Wire {
  Transport* transport = nullptr;
  Idle* idle = nullptr;
  std::int64_t segment_bytes = 0;
  std::vector<int> members;  // ranks, in the order of the ring; this rank is one of them
  Stages* stages = nullptr;  // null: not measured

  int size() const { return static_cast<int>(members.size()); }
  int rank() const {
    const auto own = std::find(members.begin(), members.end(), transport->rank());
    return static_cast<int>(own - members.begin());
  }
  int peer(int member) const { return members[member]; }
  int next() const { return peer((rank() + 1) % size()); }
  int prev() const { return peer((rank() + size() - 1) % size()); }
};

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_WIRE_H_
