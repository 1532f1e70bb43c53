// Collectives among the ranks of one host in which each has something of its own for every other:
// alltoall and reducescatter. As in local.h, a window goes through the slots at a time; a slot is
// cut into one part for each other rank, which that rank takes from there.
#ifndef KERAS_RING_COLLECTIVES_LOCAL_PARTS_H_
#define KERAS_RING_COLLECTIVES_LOCAL_PARTS_H_

#include <cstdint>

#include "collectives/local.h"
#include "collectives/pairwise.h"
#include "collectives/ring.h"

namespace keras_ring {

// Whether the slots have room for an element of every rank.
bool HasRoomForParts(const Arena& arena);

// See PairwiseAlltoall. `largest_bytes`: the largest block that any rank has for another one, the
// same on all ranks.
// Cost per rank: what it sends is written once into slots, which stay in cache, and read from
// there.
void LocalAlltoall(const LocalWire& wire, const Blocks& blocks, std::int64_t largest_bytes);

// See RingReducescatter. The inputs are added in the order of the ranks.
// Cost per rank: (P-1)/P * S written into slots; S read to be summed.
void LocalReducescatter(const LocalWire& wire, const Bucket& bucket);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_LOCAL_PARTS_H_
