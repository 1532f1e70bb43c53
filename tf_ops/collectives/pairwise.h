// Direct exchanges between two members, and all-to-all made of them: for ranks that share no
// memory.
#ifndef KERAS_RING_COLLECTIVES_PAIRWISE_H_
#define KERAS_RING_COLLECTIVES_PAIRWISE_H_

#include <cstdint>
#include <vector>

#include "collectives/exchange.h"
#include "collectives/wire.h"

namespace keras_ring {

// What a rank has for each member and gets from each. Both lie one after the other in the order of
// the members; the memories do not overlap. What a member has for another is what that one gets.
struct Blocks {
  const void* input = nullptr;
  std::vector<std::int64_t> send_bytes;  // to each member
  void* output = nullptr;
  std::vector<std::int64_t> recv_bytes;  // from each member
};

// Sends to one member while it receives from another, in segments. All members that take part
// exchange in the same order.
void ExchangeBytes(const Wire& wire, int to, ConstBytes source, int from, MutableBytes target);

// Every member calls it. In step s each sends to the member s places behind it.
// Cost: P-1 steps; what the others get is sent once, straight from the input into the output.
// Source: Bruck et al., Efficient algorithms for all-to-all communications in multiport
// message-passing systems, IEEE TPDS 1997 (section 3, the direct algorithm).
void PairwiseAlltoall(const Wire& wire, const Blocks& blocks);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_PAIRWISE_H_
