// Ranks as threads of one process: the transport of the native tests. Messages are copied, which
// makes every send complete at once; order and blocking are those of the real thing.
#ifndef KERAS_RING_TRANSPORT_INPROCESS_H_
#define KERAS_RING_TRANSPORT_INPROCESS_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace keras_ring {

// The wires between the ranks. `Kill` makes a rank look dead to the others.
class InprocessHub {
 public:
  // With `slot_bytes` the ranks of each host of the topology share an arena with slots of this
  // size.
  explicit InprocessHub(const Topology& topology, std::size_t slot_bytes = 0);
  ~InprocessHub();
  InprocessHub(const InprocessHub&) = delete;
  InprocessHub& operator=(const InprocessHub&) = delete;

  // The endpoint of `rank`, to be used by one thread. It must not outlive the hub.
  std::unique_ptr<Transport> Connect(int rank);
  void Kill(int rank);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace keras_ring

#endif  // KERAS_RING_TRANSPORT_INPROCESS_H_
