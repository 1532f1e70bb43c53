#include <algorithm>
#include <memory>
#include <utility>

#include "collectives/add_sources.h"
#include "collectives/bucket_view.h"
#include "collectives/exchange.h"
#include "collectives/ring.h"
#include "collectives/ring_plan.h"
#include "collectives/schedule.h"
#include "transport/kept.h"

namespace keras_ring {
namespace {

// A rank's own tensors.
class BucketSegments : public RingSegments {
 public:
  BucketSegments(const Wire& wire, const Bucket& bucket)
      : stages_(wire.stages),
        bucket_(bucket),
        rank_(wire.rank()),
        elem_bytes_(static_cast<std::int64_t>(DTypeBytes(bucket.dtype))),
        view_(bucket, wire.size()),
        segment_elems_(std::max<std::int64_t>(
            1, wire.segment_bytes / static_cast<std::int64_t>(AccumulatorBytes(bucket.dtype)))) {}

  DType dtype() const override { return bucket_.dtype; }
  Format own_format() const override { return Format::kTensor; }
  std::int64_t num_slabs() const override {
    return (view_.max_chunk_elems() + segment_elems_ - 1) / segment_elems_;
  }
  std::int64_t max_elems() const override {
    return std::min(segment_elems_, view_.max_chunk_elems());
  }
  std::int64_t Elems(int chunk, std::int64_t slab) const override {
    return Segment(chunk, slab).elems();
  }
  bool IsReady(std::int64_t) override { return true; }

  const void* PutOwn(int chunk, std::int64_t slab, void* staging) override {
    const auto spans = Spans(chunk, slab);
    if (spans.size() == 1 && bucket_.before.is_identity()) return spans[0].input;
    const StageTimer timer(stages_, Stage::kPack);
    for (const auto& span : spans) {
      ScaleTo(bucket_.dtype, Format::kTensor, span.input, bucket_.before,
              static_cast<char*>(staging) + span.offset * elem_bytes_, span.elems);
    }
    return staging;
  }

  void AddOwn(int chunk, std::int64_t slab, Format format, const void* partial, void* to) override {
    const StageTimer timer(stages_, Stage::kReduce);
    const auto to_bytes = static_cast<std::int64_t>(AccumulatorBytes(bucket_.dtype));
    const std::int64_t from_bytes = format == Format::kTensor ? elem_bytes_ : to_bytes;
    for (const auto& span : Spans(chunk, slab)) {
      Combine(bucket_.dtype, bucket_.op, format,
              static_cast<const char*>(partial) + span.offset * from_bytes, span.input,
              bucket_.before, static_cast<char*>(to) + span.offset * to_bytes, span.elems);
    }
  }

  const void* AddOwnAndKeep(int chunk, std::int64_t slab, Format format, const void* partial,
                            void* staging) override {
    const StageTimer timer(stages_, Stage::kReduce);
    const auto spans = Spans(chunk, slab);
    // In one piece the result is put straight into the tensor and sent from there.
    char* const to = spans.size() == 1 ? spans[0].output : static_cast<char*>(staging);
    const auto partial_bytes = static_cast<std::int64_t>(
        format == Format::kTensor ? elem_bytes_ : AccumulatorBytes(bucket_.dtype));
    for (const auto& span : spans) {
      AddSourcesAndScale(bucket_, format,
                         static_cast<const char*>(partial) + span.offset * partial_bytes,
                         {span.input}, to + span.offset * elem_bytes_, span.elems);
    }
    if (spans.size() > 1) CopyOut(spans, to);
    return to;
  }

  const Scale& after() const override { return bucket_.after; }

  // This rank's own chunk is sent straight from the input; when output and input are the same
  // memory, that send may not have left yet.
  void* PlaceToKeep(int chunk, std::int64_t slab) override {
    const auto spans = Spans(chunk, slab);
    if (spans.size() != 1 || (chunk == rank_ && spans[0].input == spans[0].output)) return nullptr;
    return spans[0].output;
  }

  void Keep(int chunk, std::int64_t slab, const void* complete) override {
    const StageTimer timer(stages_, Stage::kUnpack);
    CopyOut(Spans(chunk, slab), static_cast<const char*>(complete));
  }

  void HaveKept(std::int64_t) override {}

 private:
  Range Segment(int chunk, std::int64_t slab) const {
    return view_.Clip(chunk, Range{slab * segment_elems_, (slab + 1) * segment_elems_});
  }
  std::vector<BucketView::Span> Spans(int chunk, std::int64_t slab) const {
    return view_.Spans(chunk, Segment(chunk, slab));
  }

  void CopyOut(const std::vector<BucketView::Span>& spans, const char* from) const {
    for (const auto& span : spans) {
      ScaleTo(bucket_.dtype, Format::kTensor, from + span.offset * elem_bytes_, Scale{},
              span.output, span.elems);
    }
  }

  Stages* const stages_;
  const Bucket& bucket_;
  const int rank_;
  const std::int64_t elem_bytes_;
  const BucketView view_;
  const std::int64_t segment_elems_;
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
  BucketSegments segments(wire, bucket);
  auto plan =
      std::make_unique<RingAllreducePlan>(wire.rank(), wire.size(), &segments, bucket.codec);
  try {
    RunExchanges(wire, plan.get());
  } catch (...) {
    KeepForever(std::move(plan));
    throw;
  }
}

}  // namespace keras_ring
