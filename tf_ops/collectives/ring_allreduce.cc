#include <algorithm>
#include <memory>

#include "collectives/bucket_view.h"
#include "collectives/exchange.h"
#include "collectives/ring.h"
#include "collectives/schedule.h"

namespace keras_ring {
namespace {

// Slabs under way at once. On two ranks a slab has two steps, so that four keep two messages in
// each direction beside the two being worked on.
constexpr int kDepth = 4;

// Where the data of a slab lies, step by step (P ranks, the last reducing step is P-2):
//
//   received in step          into                     sent in the next step from
//   0                         raw (tensor format)      partial[0] (own input added)
//   0 < s <= P-2              partial[s % 2]           the same place (own input added)
//   s = P-2, complete         -> scaled to output      output, or result when it is in pieces
//   s > P-2                   output, or               the same place
//                             partial[s % 2] and then copied to output
//
// A partial[] is written again two steps later; by then its send must have left.
class AllreducePlan : public ExchangePlan {
 public:
  AllreducePlan(const Wire& wire, const Bucket& bucket)
      : bucket_(bucket),
        rank_(wire.rank()),
        elem_bytes_(DTypeBytes(bucket.dtype)),
        accumulator_bytes_(AccumulatorBytes(bucket.dtype)),
        view_(bucket, wire.size()),
        steps_(RingAllreduceSteps(wire.rank(), wire.size())),
        last_reducing_(wire.size() - 2),
        segment_elems_(std::max<std::int64_t>(
            1, wire.segment_bytes / static_cast<std::int64_t>(accumulator_bytes_))),
        num_slabs_((view_.max_chunk_elems() + segment_elems_ - 1) / segment_elems_),
        order_(PipelineOrder(num_slabs_, static_cast<int>(steps_.size()), kDepth)),
        number_(num_slabs_ * steps_.size()) {
    for (std::size_t i = 0; i < order_.size(); ++i) {
      number_[order_[i].slab * steps_.size() + order_[i].step] = static_cast<std::int64_t>(i);
    }
    const std::int64_t buffer_elems = std::min(segment_elems_, view_.max_chunk_elems());
    for (Slot& slot : slots_) {
      slot.partial[0] = Allocate(buffer_elems * accumulator_bytes_);
      slot.partial[1] = Allocate(buffer_elems * accumulator_bytes_);
      slot.raw = Allocate(buffer_elems * elem_bytes_);
      slot.packed = Allocate(buffer_elems * elem_bytes_);
      slot.result = Allocate(buffer_elems * elem_bytes_);
    }
  }

  std::int64_t num_exchanges() const override { return static_cast<std::int64_t>(order_.size()); }

  std::int64_t SendDependsOn(std::int64_t i) const override {
    return order_[i].step == 0 ? -1 : Number(order_[i].slab, order_[i].step - 1);
  }

  std::int64_t MemoryDependsOn(std::int64_t i) const override {
    const std::int64_t before = order_[i].slab - kDepth;  // had the same slot
    return before < 0 ? -1 : Number(before, static_cast<int>(steps_.size()) - 1);
  }

  std::int64_t OverwritesSendsBelow(std::int64_t i) const override {
    const auto [slab, step] = order_[i];
    if (step >= 2) return Number(slab, step - 1) + 1;  // what was sent from the same partial[]
    // The slot's slab before this one has arrived, but may still be leaving.
    return slab < kDepth ? 0 : Number(slab - kDepth, static_cast<int>(steps_.size()) - 1) + 1;
  }

  ConstBytes SendSource(std::int64_t i) override {
    const auto [slab, step] = order_[i];
    const int chunk = steps_[step].send_chunk;
    const Range segment = Segment(chunk, slab);
    const std::size_t elems = segment.elems();
    Slot& slot = slots_[slab % kDepth];
    if (step == 0) {
      const auto spans = view_.Spans(chunk, segment);
      if (spans.size() == 1 && bucket_.before.is_identity()) {
        return {spans[0].input, elems * elem_bytes_};
      }
      for (const auto& span : spans) {
        ScaleTo(bucket_.dtype, Format::kTensor, span.input, bucket_.before,
                slot.packed.get() + span.offset * elem_bytes_, span.elems);
      }
      return {slot.packed.get(), elems * elem_bytes_};
    }
    if (step <= last_reducing_) {
      return {slot.partial[(step - 1) % 2].get(), elems * accumulator_bytes_};
    }
    return {slot.complete, elems * elem_bytes_};
  }

  MutableBytes RecvTarget(std::int64_t i) override {
    const auto [slab, step] = order_[i];
    const int chunk = steps_[step].recv_chunk;
    const Range segment = Segment(chunk, slab);
    const std::size_t elems = segment.elems();
    Slot& slot = slots_[slab % kDepth];
    if (step == 0) return {slot.raw.get(), elems * elem_bytes_};
    if (step <= last_reducing_) {
      return {slot.partial[step % 2].get(), elems * accumulator_bytes_};
    }
    char* direct = DirectOutput(chunk, segment);
    return {direct != nullptr ? direct : slot.partial[step % 2].get(), elems * elem_bytes_};
  }

  void Received(std::int64_t i) override {
    const auto [slab, step] = order_[i];
    const int chunk = steps_[step].recv_chunk;
    const Range segment = Segment(chunk, slab);
    Slot& slot = slots_[slab % kDepth];
    if (step > last_reducing_) {
      slot.complete = DirectOutput(chunk, segment);
      if (slot.complete == nullptr) {
        slot.complete = slot.partial[step % 2].get();
        CopyOut(chunk, segment, slot.complete);
      }
      return;
    }
    char* partial = slot.partial[step % 2].get();
    const auto spans = view_.Spans(chunk, segment);
    for (const auto& span : spans) {
      const char* from = step == 0 ? slot.raw.get() + span.offset * elem_bytes_
                                   : partial + span.offset * accumulator_bytes_;
      Combine(bucket_.dtype, bucket_.op, step == 0 ? Format::kTensor : Format::kAccumulator, from,
              span.input, bucket_.before, partial + span.offset * accumulator_bytes_, span.elems);
    }
    if (step < last_reducing_) return;
    // In one piece the result is scaled straight into the tensor and sent from there.
    slot.complete = spans.size() == 1 ? spans[0].output : slot.result.get();
    ScaleTo(bucket_.dtype, Format::kAccumulator, partial, bucket_.after, slot.complete,
            segment.elems());
    if (spans.size() > 1) CopyOut(chunk, segment, slot.complete);
  }

 private:
  struct Slot {
    std::unique_ptr<char[]> partial[2];
    std::unique_ptr<char[]> raw;
    std::unique_ptr<char[]> packed;  // own input, when it is in pieces or to be scaled
    std::unique_ptr<char[]> result;
    char* complete = nullptr;  // the reduced segment that is sent on next
  };

  // Not zeroed: a page that is never used is never touched.
  static std::unique_ptr<char[]> Allocate(std::size_t bytes) {
    return std::unique_ptr<char[]>(new char[bytes]);
  }

  std::int64_t Number(std::int64_t slab, int step) const {
    return number_[slab * steps_.size() + step];
  }

  Range Segment(int chunk, std::int64_t slab) const {
    return view_.Clip(chunk, Range{slab * segment_elems_, (slab + 1) * segment_elems_});
  }

  // The output of a segment that lies in one piece, or null. This rank's own chunk is sent
  // straight from the input; when output and input are the same memory, that send may not have
  // left yet.
  char* DirectOutput(int chunk, Range segment) const {
    const auto spans = view_.Spans(chunk, segment);
    if (spans.size() != 1 || (chunk == rank_ && spans[0].input == spans[0].output)) return nullptr;
    return spans[0].output;
  }

  void CopyOut(int chunk, Range segment, const char* from) const {
    for (const auto& span : view_.Spans(chunk, segment)) {
      ScaleTo(bucket_.dtype, Format::kTensor, from + span.offset * elem_bytes_, Scale{},
              span.output, span.elems);
    }
  }

  const Bucket& bucket_;
  const int rank_;
  const std::size_t elem_bytes_;
  const std::size_t accumulator_bytes_;
  const BucketView view_;
  const std::vector<RingStep> steps_;
  const int last_reducing_;
  const std::int64_t segment_elems_;
  const std::int64_t num_slabs_;
  const std::vector<SlabStep> order_;
  std::vector<std::int64_t> number_;  // of (slab, step) in order_
  Slot slots_[kDepth];
};

}  // namespace

void RingAllreduce(const Wire& wire, const Bucket& bucket) {
  if (wire.size() == 1) {
    const Scale both{bucket.before.factor * bucket.after.factor, bucket.after.divisor};
    for (const BucketTensor& tensor : bucket.tensors) {
      ScaleTo(bucket.dtype, Format::kTensor, tensor.input, both, tensor.output, tensor.elems);
    }
    return;
  }
  auto plan = std::make_unique<AllreducePlan>(wire, bucket);
  try {
    RunExchanges(wire, plan.get());
  } catch (...) {
    // The network may still write to the staging memory of a failed generation: it is never given
    // back. The generation ends once, so this is once, too.
    static_cast<void>(plan.release());
    throw;
  }
}

}  // namespace keras_ring
