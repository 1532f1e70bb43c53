#include "collectives/local.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "collectives/bucket_view.h"
#include "collectives/schedule.h"
#include "reduce/copy.h"

namespace keras_ring {
namespace {

// Looks at shared memory before sleeping: about 5 us, the time in which a rank that is in step
// arrives. Sleeping and being woken costs ten times as much.
constexpr int kLooks = 400;

// Results of this size do not fit any cache together with what was read for them.
constexpr std::int64_t kPastCacheBytes = 8 * 1024 * 1024;

void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until what only shared memory can make true, and for which the bell rings, is true.
template <typename Condition>
void Await(const LocalWire& wire, Condition is_true) {
  for (int look = 0; look < kLooks; ++look) {
    if (is_true()) return;
    Relax();
  }
  Bell* const bell = wire.arena->bell(wire.arena->local_rank());
  for (;;) {
    const std::uint32_t seen = bell->count.load();
    if (is_true()) break;
    wire.idle->Step(seen, /*rings=*/true);
  }
  wire.idle->Reset();
}

// Waits until all other local ranks have done so many windows.
void AwaitAll(const LocalWire& wire, Arena::Stage stage, std::int64_t windows) {
  Await(wire, [&] { return wire.arena->HaveAll(stage, windows); });
}

// All ranks leave a collective with the same count of windows, whatever each had to do.
void FinishAt(const LocalWire& wire, std::int64_t windows) {
  for (const auto stage : {Arena::kPacked, Arena::kReduced, Arena::kCopied}) {
    if (wire.arena->Progress(wire.arena->local_rank(), stage) < windows) {
      wire.arena->SetProgress(stage, windows);
    }
  }
  wire.arena->first_window = windows;
}

class Allreduce {
 public:
  using Between = std::function<void(void*, std::int64_t)>;

  Allreduce(const LocalWire& wire, const Bucket& bucket, const Between* between)
      : wire_(wire),
        arena_(*wire.arena),
        bucket_(bucket),
        between_(between),
        elem_bytes_(static_cast<std::int64_t>(DTypeBytes(bucket.dtype))),
        view_(bucket, 1),
        num_elems_(view_.max_chunk_elems()),
        window_elems_(WindowElems()),
        num_windows_((num_elems_ + window_elems_ - 1) / window_elems_),
        first_window_(arena_.first_window) {
    if (between_ == nullptr) return;
    accumulators_.reset(new char[PartOf(window_elems_, arena_.local_size(), 0).elems() *
                                 AccumulatorBytes(bucket.dtype)]);
  }

  void Run() {
    for (std::int64_t turn = 0; turn < num_windows_ + 2; ++turn) {
      if (turn < num_windows_) Pack(turn);
      if (turn >= 1 && turn - 1 < num_windows_) ReduceOwn(turn - 1);
      if (turn >= 2) CopyOut(turn - 2);
    }
    FinishAt(wire_, first_window_ + num_windows_);
  }

 private:
  // A few windows at least, so that the ranks work beside each other, but none so small that
  // telling each other costs more than the data.
  std::int64_t WindowElems() const {
    constexpr std::int64_t kLeastBytes = 32 * 1024;
    const std::int64_t most = static_cast<std::int64_t>(arena_.slot_bytes()) / elem_bytes_;
    const std::int64_t fourth = (num_elems_ + Arena::kNumSlots - 1) / Arena::kNumSlots;
    return std::clamp(fourth, std::min(most, kLeastBytes / elem_bytes_), most);
  }

  Range Window(std::int64_t window) const {
    return Range{window * window_elems_, std::min((window + 1) * window_elems_, num_elems_)};
  }

  // The part of a window that a rank reduces, in elements from the window's beginning.
  Range Part(std::int64_t window, int local_rank) const {
    return PartOf(Window(window).elems(), arena_.local_size(), local_rank);
  }

  std::vector<BucketView::Span> Spans(std::int64_t window, Range part) const {
    const std::int64_t begin = Window(window).begin;
    return view_.Spans(0, Range{begin + part.begin, begin + part.end});
  }

  char* SlotAt(int local_rank, std::int64_t window, std::int64_t elem) const {
    return arena_.Slot(local_rank, first_window_ + window) + elem * elem_bytes_;
  }

  void Pack(std::int64_t window) {
    // The slot is free when nobody reads its former window any more.
    AwaitAll(wire_, Arena::kCopied, first_window_ + window + 1 - Arena::kNumSlots);
    const int own = arena_.local_rank();
    for (int other = 0; other < arena_.local_size(); ++other) {
      if (other == own) continue;
      const Range part = Part(window, other);
      for (const auto& span : Spans(window, part)) {
        std::memcpy(SlotAt(own, window, part.begin + span.offset), span.input,
                    span.elems * elem_bytes_);
      }
    }
    arena_.SetProgress(Arena::kPacked, first_window_ + window + 1);
  }

  void ReduceOwn(std::int64_t window) {
    AwaitAll(wire_, Arena::kPacked, first_window_ + window + 1);
    const int own = arena_.local_rank();
    const Range part = Part(window, own);
    const auto spans = Spans(window, part);
    std::vector<const void*> sources(arena_.local_size());
    const auto sources_at = [&](const BucketView::Span& span) {
      for (int other = 0; other < arena_.local_size(); ++other) {
        sources[other] = other == own ? static_cast<const void*>(span.input)
                                      : SlotAt(other, window, part.begin + span.offset);
      }
    };
    if (between_ == nullptr) {
      for (const auto& span : spans) {
        sources_at(span);
        Reduce(bucket_.dtype, bucket_.op, sources, bucket_.before, bucket_.after,
               SlotAt(own, window, part.begin + span.offset), span.elems);
      }
    } else {
      const std::size_t accumulator_bytes = AccumulatorBytes(bucket_.dtype);
      for (const auto& span : spans) {
        sources_at(span);
        ReduceToAccumulators(bucket_.dtype, bucket_.op, sources, bucket_.before,
                             accumulators_.get() + span.offset * accumulator_bytes, span.elems);
      }
      (*between_)(accumulators_.get(), part.elems());
      ScaleTo(bucket_.dtype, Format::kAccumulator, accumulators_.get(), bucket_.after,
              SlotAt(own, window, part.begin), part.elems());
    }
    arena_.SetProgress(Arena::kReduced, first_window_ + window + 1);
    CopyPart(window, own);
  }

  void CopyOut(std::int64_t window) {
    AwaitAll(wire_, Arena::kReduced, first_window_ + window + 1);
    for (int other = 0; other < arena_.local_size(); ++other) {
      if (other != arena_.local_rank()) CopyPart(window, other);
    }
    arena_.SetProgress(Arena::kCopied, first_window_ + window + 1);
  }

  void CopyPart(std::int64_t window, int owner) {
    const Range part = Part(window, owner);
    for (const auto& span : Spans(window, part)) {
      const char* const from = SlotAt(owner, window, part.begin + span.offset);
      const std::int64_t bytes = span.elems * elem_bytes_;
      // In place the memory is in the cache, since it was read a moment ago.
      if (num_elems_ * elem_bytes_ >= kPastCacheBytes && span.output != span.input) {
        CopyPastCache(span.output, from, bytes);
      } else {
        std::memcpy(span.output, from, bytes);
      }
    }
  }

  const LocalWire& wire_;
  Arena& arena_;
  const Bucket& bucket_;
  const Between* const between_;
  const std::int64_t elem_bytes_;
  const BucketView view_;
  const std::int64_t num_elems_;
  const std::int64_t window_elems_;
  const std::int64_t num_windows_;
  const std::int64_t first_window_;
  std::unique_ptr<char[]> accumulators_;
};

}  // namespace

void LocalAllreduce(const LocalWire& wire, const Bucket& bucket) {
  Allreduce(wire, bucket, nullptr).Run();
}

void LocalAllreduceAround(const LocalWire& wire, const Bucket& bucket,
                          const std::function<void(void*, std::int64_t)>& between) {
  Allreduce(wire, bucket, &between).Run();
}

void LocalAllgather(const LocalWire& wire, const void* input,
                    const std::vector<std::int64_t>& block_bytes, void* output) {
  Arena& arena = *wire.arena;
  const int own = arena.local_rank();
  const auto slot_bytes = static_cast<std::int64_t>(arena.slot_bytes());
  const std::int64_t first = arena.first_window;
  const std::int64_t num_windows =
      (*std::max_element(block_bytes.begin(), block_bytes.end()) + slot_bytes - 1) / slot_bytes;
  const auto window_of = [&](int rank, std::int64_t window) {
    return Range{std::min(window * slot_bytes, block_bytes[rank]),
                 std::min((window + 1) * slot_bytes, block_bytes[rank])};
  };
  const char* const from = static_cast<const char*>(input);
  for (std::int64_t turn = 0; turn < num_windows + 1; ++turn) {
    if (turn < num_windows) {
      AwaitAll(wire, Arena::kCopied, first + turn + 1 - Arena::kNumSlots);
      const Range range = window_of(own, turn);
      if (range.elems() > 0) {
        std::memcpy(arena.Slot(own, first + turn), from + range.begin, range.elems());
      }
      arena.SetProgress(Arena::kPacked, first + turn + 1);
    }
    if (turn == 0) continue;
    AwaitAll(wire, Arena::kPacked, first + turn);
    char* to = static_cast<char*>(output);
    for (int rank = 0; rank < arena.local_size(); to += block_bytes[rank++]) {
      const Range range = window_of(rank, turn - 1);
      const char* const source =
          rank == own ? from + range.begin : arena.Slot(rank, first + turn - 1);
      if (range.elems() > 0 && source != to + range.begin) {
        std::memcpy(to + range.begin, source, range.elems());
      }
    }
    arena.SetProgress(Arena::kCopied, first + turn);
  }
  FinishAt(wire, first + num_windows);
}

void LocalBroadcast(const LocalWire& wire, int root, void* data, std::int64_t bytes) {
  Arena& arena = *wire.arena;
  const auto slot_bytes = static_cast<std::int64_t>(arena.slot_bytes());
  const std::int64_t first = arena.first_window;
  const std::int64_t num_windows = (bytes + slot_bytes - 1) / slot_bytes;
  for (std::int64_t window = 0; window < num_windows; ++window) {
    char* const at = static_cast<char*>(data) + window * slot_bytes;
    const std::int64_t size = std::min(slot_bytes, bytes - window * slot_bytes);
    if (arena.local_rank() == root) {
      AwaitAll(wire, Arena::kCopied, first + window + 1 - Arena::kNumSlots);
      std::memcpy(arena.Slot(root, first + window), at, size);
      arena.SetProgress(Arena::kPacked, first + window + 1);
    } else {
      Await(wire, [&] { return arena.Progress(root, Arena::kPacked) >= first + window + 1; });
      std::memcpy(at, arena.Slot(root, first + window), size);
      arena.SetProgress(Arena::kCopied, first + window + 1);
    }
  }
  FinishAt(wire, first + num_windows);
}

}  // namespace keras_ring
