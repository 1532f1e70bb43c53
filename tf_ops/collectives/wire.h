// What a collective is run over: the transport, the way to wait, and the size of a message.
#ifndef KERAS_RING_COLLECTIVES_WIRE_H_
#define KERAS_RING_COLLECTIVES_WIRE_H_

#include <cstdint>

#include "transport/transport.h"

namespace keras_ring {

struct Wire {
  Transport* transport = nullptr;
  Idle* idle = nullptr;
  std::int64_t segment_bytes = 0;

  int rank() const { return transport->rank(); }
  int size() const { return transport->size(); }
  int next() const { return (rank() + 1) % size(); }
  int prev() const { return (rank() + size() - 1) % size(); }
};

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_WIRE_H_
