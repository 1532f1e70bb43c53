// The ops as a graph sees them: names, attributes, types, shapes. No kernel is here.
#ifndef KERAS_RING_OPS_OP_DEFS_H_
#define KERAS_RING_OPS_OP_DEFS_H_

#include <string>

namespace keras_ring {

inline constexpr char kAllreduceOp[] = "KerasRingAllreduce";
inline constexpr char kAllgatherOp[] = "KerasRingAllgather";
inline constexpr char kBroadcastOp[] = "KerasRingBroadcast";
inline constexpr char kBarrierOp[] = "KerasRingBarrier";
inline constexpr char kAlltoallOp[] = "KerasRingAlltoall";
inline constexpr char kJoinOp[] = "KerasRingJoin";
inline constexpr char kReducescatterOp[] = "KerasRingReducescatter";

// Registers all op definitions; returns an error message or "".
std::string RegisterOps();

}  // namespace keras_ring

#endif  // KERAS_RING_OPS_OP_DEFS_H_
