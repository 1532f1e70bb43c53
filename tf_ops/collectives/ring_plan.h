// The exchanges of a ring allreduce, whatever the data comes from and goes to: a rank's own tensors
// (the flat ring) or the memory of a host (the ring between hosts).
//
// Words: what a ring sums up is cut into one chunk for each member, chunks into segments; the
// segments of the same number of all chunks are a slab, which goes around by itself.
#ifndef KERAS_RING_COLLECTIVES_RING_PLAN_H_
#define KERAS_RING_COLLECTIVES_RING_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/exchange.h"
#include "collectives/schedule.h"
#include "compression/codec.h"
#include "core/dtype.h"
#include "reduce/reduce.h"

namespace keras_ring {

// What a member brings to the ring and what it does with the sums. A segment that no member has
// elements of is never asked for; otherwise all have as many.
class RingSegments {
 public:
  virtual ~RingSegments() = default;

  virtual DType dtype() const = 0;
  // How PutOwn leaves elements.
  virtual Format own_format() const = 0;
  virtual std::int64_t num_slabs() const = 0;
  // Of the largest segment.
  virtual std::int64_t max_elems() const = 0;
  virtual std::int64_t Elems(int chunk, std::int64_t slab) const = 0;

  // Whether what this member brings to a slab is there, and the place for the slab's sums is free.
  // Asked in any order of the slabs; stays true once it is.
  virtual bool IsReady(std::int64_t slab) = 0;

  // What this member brings, in own_format(): in `staging`, or where it lies anyway.
  virtual const void* PutOwn(int chunk, std::int64_t slab, void* staging) = 0;
  // to = partial + own, in accumulators; `to` may be `partial` when that is accumulators, too.
  virtual void AddOwn(int chunk, std::int64_t slab, Format format, const void* partial,
                      void* to) = 0;
  // The same for the member that comes last: the sum is complete, scaled, rounded to the tensor's
  // format and kept. Returns where it may be sent from, which may be `staging`.
  virtual const void* AddOwnAndKeep(int chunk, std::int64_t slab, Format format,
                                    const void* partial, void* staging) = 0;

  // What AddOwnAndKeep scales a sum with.
  virtual const Scale& after() const = 0;

  // Where a complete segment, in the tensor's format, may be received, or null.
  virtual void* PlaceToKeep(int chunk, std::int64_t slab) = 0;
  // A complete segment has come, to the place that was given or elsewhere.
  virtual void Keep(int chunk, std::int64_t slab, const void* complete) = 0;
  // All segments of the slab are kept. Called in the order of the slabs.
  virtual void HaveKept(std::int64_t slab) = 0;
};

// Slabs under way at once. On two ranks a slab has two steps, so that four keep two messages in
// each direction beside the two being worked on.
inline constexpr int kRingDepth = 4;

// What travels: in the first step own_format(), then partial sums as accumulators, then complete
// segments in the tensor's format. With a codec, for types that are their own accumulators, all of
// these travel as payloads: each sum is encoded once, by the member that has added its part;
// complete segments are passed on as they came, and the member that completes one keeps what the
// others will decode.
class RingAllreducePlan : public ExchangePlan {
 public:
  // `segments` and `codec` (null: none) must outlive the plan. At least two members.
  RingAllreducePlan(int rank, int size, RingSegments* segments, Codec* codec = nullptr);

  std::int64_t num_exchanges() const override { return static_cast<std::int64_t>(order_.size()); }
  std::int64_t SendDependsOn(std::int64_t i) const override;
  std::int64_t MemoryDependsOn(std::int64_t i) const override;
  std::int64_t OverwritesSendsBelow(std::int64_t i) const override;
  bool MayPostRecv(std::int64_t i) override;
  bool MayTouch(std::int64_t i) override { return segments_->IsReady(order_[i].slab); }
  ConstBytes SendSource(std::int64_t i) override;
  MutableBytes RecvTarget(std::int64_t i) override;
  void Received(std::int64_t i) override;

 private:
  struct Slot {
    std::unique_ptr<char[]> partial[2];
    std::unique_ptr<char[]> first;   // received in step 0, when that is in the tensor's format
    std::unique_ptr<char[]> own;     // sent in step 0, when it does not lie anywhere
    std::unique_ptr<char[]> result;  // complete here, when it does not lie anywhere
    const void* complete = nullptr;  // the complete segment that is sent on next
    // With a codec there is nothing but these; partial[] has the same place in the table of steps.
    std::unique_ptr<char[]> payload[2];
    std::unique_ptr<char[]> own_payload;
  };

  std::int64_t Number(std::int64_t slab, int step) const {
    return number_[slab * steps_.size() + step];
  }
  Slot& SlotOf(std::int64_t slab) { return slots_[slab % kRingDepth]; }
  int last_step() const { return static_cast<int>(steps_.size()) - 1; }
  // Of what travels in a step.
  std::size_t Bytes(int step, std::int64_t elems) const;
  void AllocateSlots();
  void ReceivedPayload(int chunk, std::int64_t slab, int step);

  RingSegments* const segments_;
  Codec* const codec_;
  const std::size_t elem_bytes_;
  const std::size_t accumulator_bytes_;
  const std::vector<RingStep> steps_;
  const int last_reducing_;
  const std::vector<SlabStep> order_;
  std::vector<std::int64_t> number_;  // of (slab, step) in order_
  Slot slots_[kRingDepth];
  std::unique_ptr<char[]> values_;  // with a codec: a segment before it is encoded
};

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_RING_PLAN_H_
