// Moves bytes between the ranks of one generation. Knows no tensor and no collective.
#ifndef KERAS_RING_TRANSPORT_TRANSPORT_H_
#define KERAS_RING_TRANSPORT_TRANSPORT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/arena.h"
#include "transport/bell.h"
#include "transport/topology.h"

namespace keras_ring {

// What a waiting thread does between two looks at what it waits for: sleep, serve other duties, or
// throw an Error to give up. Implemented by the engine.
class Idle {
 public:
  virtual ~Idle() = default;
  // One look found nothing. `seen` is the bell's count from before that look; `rings`: what is
  // waited for rings the bell, so that there is no need to look again before.
  virtual void Step(std::uint32_t seen, bool rings) = 0;
  // Something arrived: the next wait begins afresh.
  virtual void Reset() = 0;
  // From now on many pieces are under way at once: what counts is that the core is free for others
  // meanwhile, not that each piece is seen at once. Until the next collective.
  virtual void ExpectBulk() {}
};

// The caller guarantees: all calls come from one thread; the memory of a transfer stays valid and,
// while sending, unchanged until Test returned true for it; every transfer is tested until then.
// Transfers between one pair of ranks arrive in the order in which they were started. Control
// messages are a second channel: of any length, copied, never blocking, in order per pair.
// Failures throw Error(kPeerLost); a transport that failed is thrown away, never repaired.
class Transport {
 public:
  // Identifies a running transfer; numbers are reused after it has finished.
  using Transfer = std::int32_t;

  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual const Topology& topology() const = 0;
  int size() const { return topology().size(); }

  // Start moving `bytes` (below 2^31) to or from `peer`. The receiver knows the exact length.
  virtual Transfer Send(int peer, const void* data, std::size_t bytes) = 0;
  virtual Transfer Recv(int peer, void* data, std::size_t bytes) = 0;
  virtual bool Test(Transfer transfer) = 0;

  virtual void SendControl(int peer, std::string message) = 0;
  // False when no control message has arrived.
  virtual bool RecvControl(int* peer, std::string* message) = 0;
  // Whether control messages of this rank still wait to be taken over by the network.
  virtual bool HasUnsentControl() = 0;

  // The rank of a peer known to be dead, or -1. Cheap enough to be asked a hundred times a second.
  virtual int FindLostPeer() = 0;

  // Rings when a request is submitted, and for what peers send through shared memory. Thread: any.
  virtual Bell* bell() = 0;
  // Whether control messages may come that ring no bell, so that a rank which waits for its peers
  // has to look from time to time.
  virtual bool MustPoll() const = 0;

  // The memory shared with the ranks of this host; null where there is none.
  virtual Arena* arena() = 0;

  // Finish in agreement: called when all ranks have left, so that resources shared with them can be
  // given back. Not called after a failure.
  virtual void Close() = 0;

  void Wait(Transfer transfer, Idle* idle) {
    for (;;) {
      const std::uint32_t seen = bell()->count.load();
      if (Test(transfer)) break;
      idle->Step(seen, /*rings=*/false);
    }
    idle->Reset();
  }
};

}  // namespace keras_ring

#endif  // KERAS_RING_TRANSPORT_TRANSPORT_H_
