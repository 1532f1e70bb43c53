#include "collectives/ring_plan.h"

#include <algorithm>

namespace keras_ring {

// Where the data of a slab lies, step by step (P ranks, the last reducing step is P-2):
//
//   received in step          into                     sent in the next step from
//   0                         first, or partial[0]     partial[0] (own part added)
//   0 < s <= P-2              partial[s % 2]           the same place (own part added)
//   s = P-2, complete         -> kept                  where it is kept, or result
//   s > P-2                   where it is kept, or     the same place
//                             partial[s % 2]
//
// A partial[] is written again two steps later; by then its send must have left.
RingAllreducePlan::RingAllreducePlan(int rank, int size, RingSegments* segments, Codec* codec)
    : segments_(segments),
      codec_(codec),
      elem_bytes_(DTypeBytes(segments->dtype())),
      accumulator_bytes_(AccumulatorBytes(segments->dtype())),
      steps_(RingAllreduceSteps(rank, size)),
      last_reducing_(size - 2),
      order_(PipelineOrder(segments->num_slabs(), static_cast<int>(steps_.size()), kRingDepth)),
      number_(order_.size()) {
  for (std::size_t i = 0; i < order_.size(); ++i) {
    number_[order_[i].slab * steps_.size() + order_[i].step] = static_cast<std::int64_t>(i);
  }
  AllocateSlots();
}

void RingAllreducePlan::AllocateSlots() {
  const auto elems = static_cast<std::size_t>(segments_->max_elems());
  // Not zeroed: a page that is never used is never touched.
  const auto memory = [](std::size_t bytes) { return std::unique_ptr<char[]>(new char[bytes]); };
  if (codec_ != nullptr) {
    const std::size_t payload_bytes = codec_->PayloadBytes(segments_->max_elems());
    values_ = memory(elems * accumulator_bytes_);
    for (Slot& slot : slots_) {
      for (auto* payload : {&slot.payload[0], &slot.payload[1], &slot.own_payload}) {
        *payload = memory(payload_bytes);
      }
    }
    return;
  }
  const auto allocate = [&](std::size_t elem_bytes) { return memory(elems * elem_bytes); };
  const bool is_own_wide = segments_->own_format() == Format::kAccumulator;
  for (Slot& slot : slots_) {
    slot.partial[0] = allocate(accumulator_bytes_);
    slot.partial[1] = allocate(accumulator_bytes_);
    slot.own = allocate(is_own_wide ? accumulator_bytes_ : elem_bytes_);
    if (!is_own_wide) slot.first = allocate(elem_bytes_);
    slot.result = allocate(elem_bytes_);
  }
}

std::int64_t RingAllreducePlan::SendDependsOn(std::int64_t i) const {
  return order_[i].step == 0 ? -1 : Number(order_[i].slab, order_[i].step - 1);
}

std::int64_t RingAllreducePlan::MemoryDependsOn(std::int64_t i) const {
  const std::int64_t before = order_[i].slab - kRingDepth;  // had the same slot
  return before < 0 ? -1 : Number(before, last_step());
}

std::int64_t RingAllreducePlan::OverwritesSendsBelow(std::int64_t i) const {
  const auto [slab, step] = order_[i];
  if (step >= 2) return Number(slab, step - 1) + 1;  // what was sent from the same partial[]
  // The slot's slab before this one has arrived, but may still be leaving.
  return slab < kRingDepth ? 0 : Number(slab - kRingDepth, last_step()) + 1;
}

bool RingAllreducePlan::MayPostRecv(std::int64_t i) {
  // Partial sums come into memory of the plan's own.
  return order_[i].step <= last_reducing_ || segments_->IsReady(order_[i].slab);
}

std::size_t RingAllreducePlan::Bytes(int step, std::int64_t elems) const {
  if (codec_ != nullptr) return codec_->PayloadBytes(elems);
  const bool is_wide =
      step == 0 ? segments_->own_format() == Format::kAccumulator : step <= last_reducing_;
  return elems * (is_wide ? accumulator_bytes_ : elem_bytes_);
}

ConstBytes RingAllreducePlan::SendSource(std::int64_t i) {
  const auto [slab, step] = order_[i];
  const int chunk = steps_[step].send_chunk;
  const std::int64_t elems = segments_->Elems(chunk, slab);
  if (elems == 0) return {};
  Slot& slot = SlotOf(slab);
  const void* source = slot.complete;
  if (codec_ != nullptr && step == 0) {
    source = slot.own_payload.get();
    codec_->Encode(segments_->PutOwn(chunk, slab, values_.get()), elems, slot.own_payload.get());
  } else if (codec_ != nullptr) {
    source = slot.payload[(step - 1) % 2].get();
  } else if (step == 0) {
    source = segments_->PutOwn(chunk, slab, slot.own.get());
  } else if (step <= last_reducing_) {
    source = slot.partial[(step - 1) % 2].get();
  }
  return {source, Bytes(step, elems)};
}

MutableBytes RingAllreducePlan::RecvTarget(std::int64_t i) {
  const auto [slab, step] = order_[i];
  const int chunk = steps_[step].recv_chunk;
  const std::int64_t elems = segments_->Elems(chunk, slab);
  if (elems == 0) return {};
  Slot& slot = SlotOf(slab);
  if (codec_ != nullptr) return {slot.payload[step % 2].get(), Bytes(step, elems)};
  void* target = nullptr;
  if (step == 0) target = slot.first.get();
  if (step > last_reducing_) target = segments_->PlaceToKeep(chunk, slab);
  if (target == nullptr) target = slot.partial[step % 2].get();
  return {target, Bytes(step, elems)};
}

void RingAllreducePlan::Received(std::int64_t i) {
  const auto [slab, step] = order_[i];
  const int chunk = steps_[step].recv_chunk;
  if (segments_->Elems(chunk, slab) > 0 && codec_ != nullptr) {
    ReceivedPayload(chunk, slab, step);
  } else if (segments_->Elems(chunk, slab) > 0) {
    Slot& slot = SlotOf(slab);
    char* const partial = slot.partial[step % 2].get();
    const bool is_narrow = step == 0 && slot.first != nullptr;
    const Format format = is_narrow ? Format::kTensor : Format::kAccumulator;
    char* const received = is_narrow ? slot.first.get() : partial;
    if (step < last_reducing_) {
      segments_->AddOwn(chunk, slab, format, received, partial);
    } else if (step == last_reducing_) {
      slot.complete = segments_->AddOwnAndKeep(chunk, slab, format, received, slot.result.get());
    } else {
      const void* const place = segments_->PlaceToKeep(chunk, slab);
      slot.complete = place != nullptr ? place : partial;
      segments_->Keep(chunk, slab, slot.complete);
    }
  }
  if (step == last_step()) segments_->HaveKept(slab);
}

void RingAllreducePlan::ReceivedPayload(int chunk, std::int64_t slab, int step) {
  const std::int64_t elems = segments_->Elems(chunk, slab);
  char* const payload = SlotOf(slab).payload[step % 2].get();
  if (step <= last_reducing_) {
    codec_->Decode(payload, elems, values_.get());
    segments_->AddOwn(chunk, slab, Format::kAccumulator, values_.get(), values_.get());
    if (step == last_reducing_) {
      ScaleTo(segments_->dtype(), Format::kAccumulator, values_.get(), segments_->after(),
              values_.get(), elems);
    }
    codec_->Encode(values_.get(), elems, payload);
  }
  if (step < last_reducing_) return;
  void* place = segments_->PlaceToKeep(chunk, slab);
  if (place == nullptr) place = values_.get();
  codec_->Decode(payload, elems, place);
  segments_->Keep(chunk, slab, place);
}

}  // namespace keras_ring
