#include "collectives/reducescatter.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "collectives/bucket_view.h"
#include "collectives/exchange.h"
#include "collectives/schedule.h"

namespace keras_ring {
namespace {

// Slabs under way at once: one being received, one being sent, two being worked on.
constexpr int kDepth = 4;

// Where the segments of a slab lie (P ranks, the last step is P-2):
//
//   received in step    into                   sent in the next step from
//   0                   raw (tensor format)    partial[0] (own input added)
//   s > 0               partial[s % 2]         the same place (own input added)
//   P-2, complete       -> scaled to output
//
// A partial[] is written again two steps later; by then its send must have left.
class Plan : public ExchangePlan {
 public:
  Plan(const Wire& wire, const Bucket& bucket)
      : bucket_(bucket),
        elem_bytes_(DTypeBytes(bucket.dtype)),
        accumulator_bytes_(AccumulatorBytes(bucket.dtype)),
        view_(bucket, wire.size()),
        steps_(ReducescatterSteps(wire.rank(), wire.size())),
        segment_elems_(std::max<std::int64_t>(
            1, wire.segment_bytes / static_cast<std::int64_t>(accumulator_bytes_))),
        num_slabs_((view_.max_chunk_elems() + segment_elems_ - 1) / segment_elems_),
        order_(PipelineOrder(num_slabs_, num_steps(), kDepth)),
        number_(num_slabs_ * steps_.size()) {
    for (std::size_t i = 0; i < order_.size(); ++i) {
      number_[order_[i].slab * steps_.size() + order_[i].step] = static_cast<std::int64_t>(i);
    }
    const std::int64_t elems = std::min(segment_elems_, view_.max_chunk_elems());
    for (Slot& slot : slots_) {
      // Not zeroed: a page that is never used is never touched.
      slot.partial[0].reset(new char[elems * accumulator_bytes_]);
      slot.partial[1].reset(new char[elems * accumulator_bytes_]);
      slot.raw.reset(new char[elems * elem_bytes_]);
      slot.packed.reset(new char[elems * elem_bytes_]);
    }
  }

  std::int64_t num_exchanges() const override { return static_cast<std::int64_t>(order_.size()); }

  std::int64_t SendDependsOn(std::int64_t i) const override {
    return order_[i].step == 0 ? -1 : Number(order_[i].slab, order_[i].step - 1);
  }

  std::int64_t MemoryDependsOn(std::int64_t i) const override {
    const std::int64_t before = order_[i].slab - kDepth;  // had the same slot
    return before < 0 ? -1 : Number(before, num_steps() - 1);
  }

  std::int64_t OverwritesSendsBelow(std::int64_t i) const override {
    const auto [slab, step] = order_[i];
    if (step >= 2) return Number(slab, step - 1) + 1;  // what was sent from the same partial[]
    return slab < kDepth ? 0 : Number(slab - kDepth, num_steps() - 1) + 1;
  }

  ConstBytes SendSource(std::int64_t i) override {
    const auto [slab, step] = order_[i];
    const int chunk = steps_[step].send_chunk;
    const Range segment = Segment(chunk, slab);
    const std::size_t elems = segment.elems();
    Slot& slot = slots_[slab % kDepth];
    if (step > 0) return {slot.partial[(step - 1) % 2].get(), elems * accumulator_bytes_};
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

  MutableBytes RecvTarget(std::int64_t i) override {
    const auto [slab, step] = order_[i];
    const std::size_t elems = Segment(steps_[step].recv_chunk, slab).elems();
    Slot& slot = slots_[slab % kDepth];
    if (step == 0) return {slot.raw.get(), elems * elem_bytes_};
    return {slot.partial[step % 2].get(), elems * accumulator_bytes_};
  }

  void Received(std::int64_t i) override {
    const auto [slab, step] = order_[i];
    const int chunk = steps_[step].recv_chunk;
    Slot& slot = slots_[slab % kDepth];
    char* const partial = slot.partial[step % 2].get();
    for (const auto& span : view_.Spans(chunk, Segment(chunk, slab))) {
      char* const sum = partial + span.offset * accumulator_bytes_;
      Combine(bucket_.dtype, bucket_.op, step == 0 ? Format::kTensor : Format::kAccumulator,
              step == 0 ? slot.raw.get() + span.offset * elem_bytes_ : sum, span.input,
              bucket_.before, sum, span.elems);
      if (step == num_steps() - 1) {
        ScaleTo(bucket_.dtype, Format::kAccumulator, sum, bucket_.after, span.output, span.elems);
      }
    }
  }

 private:
  struct Slot {
    std::unique_ptr<char[]> partial[2];
    std::unique_ptr<char[]> raw;
    std::unique_ptr<char[]> packed;  // own input, when it is in pieces or to be scaled
  };

  int num_steps() const { return static_cast<int>(steps_.size()); }
  std::int64_t Number(std::int64_t slab, int step) const {
    return number_[slab * steps_.size() + step];
  }
  Range Segment(int chunk, std::int64_t slab) const {
    return view_.Clip(chunk, Range{slab * segment_elems_, (slab + 1) * segment_elems_});
  }

  const Bucket& bucket_;
  const std::size_t elem_bytes_;
  const std::size_t accumulator_bytes_;
  const BucketView view_;
  const std::vector<RingStep> steps_;
  const std::int64_t segment_elems_;
  const std::int64_t num_slabs_;
  const std::vector<SlabStep> order_;
  std::vector<std::int64_t> number_;  // of (slab, step) in order_
  Slot slots_[kDepth];
};

}  // namespace

void AddRows(const void* input, std::int64_t rows, std::int64_t row_elems, int rank, int size,
             void* output, Bucket* bucket) {
  const auto elem_bytes = static_cast<std::int64_t>(DTypeBytes(bucket->dtype));
  for (int member = 0; member < size; ++member) {
    const Range part = PartOf(rows, size, member);
    const char* const from = static_cast<const char*>(input) + part.begin * row_elems * elem_bytes;
    bucket->tensors.push_back(BucketTensor{from, member == rank ? output : nullptr,
                                           part.elems() * row_elems, /*first_chunk=*/member,
                                           /*is_whole=*/true});
  }
}

void RingReducescatter(const Wire& wire, const Bucket& bucket) {
  if (wire.size() == 1) {
    const Scale both{bucket.before.factor * bucket.after.factor, bucket.after.divisor};
    for (const BucketTensor& tensor : bucket.tensors) {
      ScaleTo(bucket.dtype, Format::kTensor, tensor.input, both, tensor.output, tensor.elems);
    }
    return;
  }
  auto plan = std::make_unique<Plan>(wire, bucket);
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
