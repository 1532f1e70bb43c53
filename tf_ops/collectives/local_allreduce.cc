#include <algorithm>

#include "collectives/bucket_view.h"
#include "collectives/local.h"
#include "collectives/schedule.h"
#include "collectives/windows.h"

namespace keras_ring {
namespace {

using Span = BucketView::Span;

// The tensors one after the other, in windows that fill a slot. Within a host the inputs are added
// in the order of the ranks, so it does not matter where a tensor lies.
class Layout {
 public:
  Layout(const Bucket& bucket, int num_ranks, std::int64_t slot_elems)
      : num_ranks_(num_ranks), view_(bucket, 1), num_elems_(view_.max_chunk_elems()) {
    // A few windows at least, so that the ranks work beside each other, but none so small that
    // telling each other costs more than the data.
    constexpr std::int64_t kLeastElems = 8 * 1024;
    const std::int64_t fourth = (num_elems_ + Arena::kNumSlots - 1) / Arena::kNumSlots;
    window_elems_ = std::clamp(fourth, std::min(slot_elems, kLeastElems), slot_elems);
  }

  std::int64_t num_windows() const { return (num_elems_ + window_elems_ - 1) / window_elems_; }

  // What lies where in a rank's part of a window; offsets from the slot's beginning.
  std::vector<Span> Part(std::int64_t window, int local_rank) const {
    const std::int64_t begin = window * window_elems_;
    const std::int64_t elems = std::min(window_elems_, num_elems_ - begin);
    const Range part = PartOf(elems, num_ranks_, local_rank);
    auto spans = view_.Spans(0, Range{begin + part.begin, begin + part.end});
    for (Span& span : spans) span.offset += part.begin;
    return spans;
  }

 private:
  const int num_ranks_;
  const BucketView view_;
  const std::int64_t num_elems_;
  std::int64_t window_elems_ = 0;
};

// The turns of pack, reduce and copy.
class Turns {
 public:
  Turns(const LocalWire& wire, const Bucket& bucket, const Layout& layout)
      : wire_(wire),
        arena_(*wire.arena),
        bucket_(bucket),
        layout_(layout),
        copies_(bucket),
        first_window_(arena_.first_window) {}

  void Run() {
    const std::int64_t num_windows = layout_.num_windows();
    for (std::int64_t turn = 0; turn < num_windows + 2; ++turn) {
      if (turn < num_windows) Pack(turn);
      if (turn >= 1 && turn - 1 < num_windows) ReduceOwn(turn - 1);
      if (turn >= 2) CopyOut(turn - 2);
    }
    FinishAt(wire_, first_window_ + num_windows);
  }

 private:
  char* SlotOf(int local_rank, std::int64_t window) const {
    return arena_.Slot(local_rank, first_window_ + window);
  }

  void Pack(std::int64_t window) {
    // The slot is free when nobody reads its former window any more.
    AwaitAll(wire_, Arena::kCopied, first_window_ + window + 1 - Arena::kNumSlots);
    const StageTimer timer(wire_.stages, Stage::kPack);
    const int own = arena_.local_rank();
    for (int other = 0; other < arena_.local_size(); ++other) {
      if (other != own) copies_.Pack(layout_.Part(window, other), SlotOf(own, window));
    }
    arena_.SetProgress(Arena::kPacked, first_window_ + window + 1);
  }

  void ReduceOwn(std::int64_t window) {
    AwaitAll(wire_, Arena::kPacked, first_window_ + window + 1);
    const int own = arena_.local_rank();
    const auto spans = layout_.Part(window, own);
    {
      const StageTimer timer(wire_.stages, Stage::kReduce);
      for (const Span& span : spans) {
        Reduce(bucket_.dtype, bucket_.op, SourcesOf(window, span), bucket_.before, bucket_.after,
               SlotOf(own, window) + span.offset * copies_.elem_bytes(), span.elems);
      }
      arena_.SetProgress(Arena::kReduced, first_window_ + window + 1);
    }
    const StageTimer timer(wire_.stages, Stage::kUnpack);
    copies_.CopyOut(spans, SlotOf(own, window));
  }

  void CopyOut(std::int64_t window) {
    AwaitAll(wire_, Arena::kReduced, first_window_ + window + 1);
    const StageTimer timer(wire_.stages, Stage::kUnpack);
    for (int other = 0; other < arena_.local_size(); ++other) {
      if (other == arena_.local_rank()) continue;
      copies_.CopyOut(layout_.Part(window, other), SlotOf(other, window));
    }
    arena_.SetProgress(Arena::kCopied, first_window_ + window + 1);
  }

  // The operands of a span of this rank's part: the others' slots and its own tensor, by rank.
  const std::vector<const void*>& SourcesOf(std::int64_t window, const Span& span) {
    sources_.resize(arena_.local_size());
    for (int rank = 0; rank < arena_.local_size(); ++rank) {
      sources_[rank] = rank == arena_.local_rank()
                           ? span.input
                           : SlotOf(rank, window) + span.offset * copies_.elem_bytes();
    }
    return sources_;
  }

  const LocalWire& wire_;
  Arena& arena_;
  const Bucket& bucket_;
  const Layout& layout_;
  const SlotCopies copies_;
  const std::int64_t first_window_;
  std::vector<const void*> sources_;
};

}  // namespace

void LocalAllreduce(const LocalWire& wire, const Bucket& bucket) {
  const auto slot_elems =
      static_cast<std::int64_t>(wire.arena->slot_bytes() / DTypeBytes(bucket.dtype));
  const Layout layout(bucket, wire.arena->local_size(), slot_elems);
  Turns(wire, bucket, layout).Run();
}

}  // namespace keras_ring
