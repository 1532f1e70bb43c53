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

// How the elements of a bucket are laid out in windows, and which part of a window each rank owns.
// A window fills a slot; its elements are numbered from the slot's beginning.
class Layout {
 public:
  using Span = BucketView::Span;

  virtual ~Layout() = default;
  virtual std::int64_t num_windows() const = 0;
  // What lies where in a rank's part of a window; offsets from the slot's beginning.
  virtual std::vector<Span> Part(std::int64_t window, int local_rank) const = 0;
};

// The tensors one after the other. Within a host the inputs are added in the order of the ranks, so
// it does not matter where a tensor lies.
class LinearLayout : public Layout {
 public:
  LinearLayout(const Bucket& bucket, int num_ranks, std::int64_t slot_elems)
      : num_ranks_(num_ranks), view_(bucket, 1), num_elems_(view_.max_chunk_elems()) {
    // A few windows at least, so that the ranks work beside each other, but none so small that
    // telling each other costs more than the data.
    constexpr std::int64_t kLeastElems = 8 * 1024;
    const std::int64_t fourth = (num_elems_ + Arena::kNumSlots - 1) / Arena::kNumSlots;
    window_elems_ = std::clamp(fourth, std::min(slot_elems, kLeastElems), slot_elems);
  }

  std::int64_t num_windows() const override {
    return (num_elems_ + window_elems_ - 1) / window_elems_;
  }

  std::vector<Span> Part(std::int64_t window, int local_rank) const override {
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

// One chunk for each rank of each host. A window has a segment of every chunk, those of one local
// rank beside each other.
class ChunkedLayout : public Layout {
 public:
  ChunkedLayout(const Bucket& bucket, int num_ranks, int num_hosts, std::int64_t slot_elems)
      : num_hosts_(num_hosts),
        view_(bucket, num_ranks * num_hosts),
        segment_elems_(std::max<std::int64_t>(1, slot_elems / (num_ranks * num_hosts))) {}

  std::int64_t num_windows() const override {
    return (view_.max_chunk_elems() + segment_elems_ - 1) / segment_elems_;
  }

  std::vector<Span> Part(std::int64_t window, int local_rank) const override {
    std::vector<Span> spans;
    for (int host = 0; host < num_hosts_; ++host) {
      const int chunk = local_rank * num_hosts_ + host;
      for (Span& span : view_.Spans(chunk, Segment(window, chunk))) {
        span.offset += chunk * segment_elems_;
        spans.push_back(span);
      }
    }
    return spans;
  }

  // Where a rank's part begins in the slot, and how far apart its chunks are.
  std::int64_t part_begin(int local_rank) const { return local_rank * num_hosts_ * segment_elems_; }
  std::int64_t segment_elems() const { return segment_elems_; }
  std::int64_t ChunkElems(std::int64_t window, int local_rank, int host) const {
    return Segment(window, local_rank * num_hosts_ + host).elems();
  }

 private:
  Range Segment(std::int64_t window, int chunk) const {
    return view_.Clip(chunk, Range{window * segment_elems_, (window + 1) * segment_elems_});
  }

  const int num_hosts_;
  const BucketView view_;
  const std::int64_t segment_elems_;
};

// The turns of pack, reduce and copy; how a part is reduced is the subclass's.
class Turns {
 public:
  Turns(const LocalWire& wire, const Bucket& bucket, const Layout& layout)
      : wire_(wire),
        arena_(*wire.arena),
        bucket_(bucket),
        layout_(layout),
        elem_bytes_(static_cast<std::int64_t>(DTypeBytes(bucket.dtype))),
        first_window_(arena_.first_window) {
    std::int64_t bytes = 0;
    for (const BucketTensor& tensor : bucket.tensors) bytes += tensor.elems * elem_bytes_;
    is_past_cache_ = bytes >= kPastCacheBytes;
  }
  virtual ~Turns() = default;

  void Run() {
    const std::int64_t num_windows = layout_.num_windows();
    for (std::int64_t turn = 0; turn < num_windows + 2; ++turn) {
      if (turn < num_windows) Pack(turn);
      if (turn >= 1 && turn - 1 < num_windows) ReduceOwn(turn - 1);
      if (turn >= 2) CopyOut(turn - 2);
    }
    FinishAt(wire_, first_window_ + num_windows);
  }

 protected:
  using Span = Layout::Span;

  // Leaves the result of this rank's part in its slot.
  virtual void ReducePart(std::int64_t window, const std::vector<Span>& spans) = 0;

  char* SlotAt(int local_rank, std::int64_t window, std::int64_t elem) const {
    return arena_.Slot(local_rank, first_window_ + window) + elem * elem_bytes_;
  }

  // The operands of a span of this rank's part: the others' slots and its own tensor, by rank.
  const std::vector<const void*>& SourcesOf(std::int64_t window, const Span& span) {
    sources_.resize(arena_.local_size());
    for (int rank = 0; rank < arena_.local_size(); ++rank) {
      sources_[rank] = rank == arena_.local_rank() ? static_cast<const void*>(span.input)
                                                   : SlotAt(rank, window, span.offset);
    }
    return sources_;
  }

  const LocalWire& wire_;
  Arena& arena_;
  const Bucket& bucket_;
  const Layout& layout_;
  const std::int64_t elem_bytes_;

 private:
  void Pack(std::int64_t window) {
    // The slot is free when nobody reads its former window any more.
    AwaitAll(wire_, Arena::kCopied, first_window_ + window + 1 - Arena::kNumSlots);
    const int own = arena_.local_rank();
    for (int other = 0; other < arena_.local_size(); ++other) {
      if (other == own) continue;
      for (const Span& span : layout_.Part(window, other)) {
        std::memcpy(SlotAt(own, window, span.offset), span.input, span.elems * elem_bytes_);
      }
    }
    arena_.SetProgress(Arena::kPacked, first_window_ + window + 1);
  }

  void ReduceOwn(std::int64_t window) {
    AwaitAll(wire_, Arena::kPacked, first_window_ + window + 1);
    const int own = arena_.local_rank();
    const auto spans = layout_.Part(window, own);
    ReducePart(window, spans);
    arena_.SetProgress(Arena::kReduced, first_window_ + window + 1);
    CopyPart(window, own, spans);
  }

  void CopyOut(std::int64_t window) {
    AwaitAll(wire_, Arena::kReduced, first_window_ + window + 1);
    for (int other = 0; other < arena_.local_size(); ++other) {
      if (other != arena_.local_rank()) CopyPart(window, other, layout_.Part(window, other));
    }
    arena_.SetProgress(Arena::kCopied, first_window_ + window + 1);
  }

  void CopyPart(std::int64_t window, int owner, const std::vector<Span>& spans) {
    for (const Span& span : spans) {
      const char* const from = SlotAt(owner, window, span.offset);
      const std::int64_t bytes = span.elems * elem_bytes_;
      // In place the memory is in the cache, since it was read a moment ago.
      if (is_past_cache_ && span.output != span.input) {
        CopyPastCache(span.output, from, bytes);
      } else {
        std::memcpy(span.output, from, bytes);
      }
    }
  }

  const std::int64_t first_window_;
  bool is_past_cache_ = false;
  std::vector<const void*> sources_;
};

class TurnsOfOneHost : public Turns {
 public:
  using Turns::Turns;

 private:
  void ReducePart(std::int64_t window, const std::vector<Span>& spans) override {
    for (const Span& span : spans) {
      Reduce(bucket_.dtype, bucket_.op, SourcesOf(window, span), bucket_.before, bucket_.after,
             SlotAt(arena_.local_rank(), window, span.offset), span.elems);
    }
  }
};

class TurnsOfHosts : public Turns {
 public:
  TurnsOfHosts(const LocalWire& wire, const Bucket& bucket, const ChunkedLayout& layout,
               int num_hosts, const Between& between)
      : Turns(wire, bucket, layout),
        chunked_(layout),
        num_hosts_(num_hosts),
        between_(between),
        accumulator_bytes_(static_cast<std::int64_t>(AccumulatorBytes(bucket.dtype))),
        accumulators_(new char[num_hosts * layout.segment_elems() * accumulator_bytes_]) {}

 private:
  void ReducePart(std::int64_t window, const std::vector<Span>& spans) override {
    const int own = arena_.local_rank();
    const std::int64_t begin = chunked_.part_begin(own);
    const auto accumulators_at = [&](std::int64_t elem) {
      return accumulators_.get() + (elem - begin) * accumulator_bytes_;
    };
    for (const Span& span : spans) {
      ReduceToAccumulators(bucket_.dtype, bucket_.op, SourcesOf(window, span), bucket_.before,
                           accumulators_at(span.offset), span.elems);
    }
    std::vector<BucketTensor> chunks;
    for (int host = 0; host < num_hosts_; ++host) {
      void* const chunk = accumulators_at(begin + host * chunked_.segment_elems());
      const std::int64_t elems = chunked_.ChunkElems(window, own, host);
      chunks.push_back(BucketTensor{chunk, chunk, elems, host, /*is_whole=*/true});
    }
    between_(chunks);
    for (int host = 0; host < num_hosts_; ++host) {
      ScaleTo(bucket_.dtype, Format::kAccumulator, chunks[host].output, bucket_.after,
              SlotAt(own, window, begin + host * chunked_.segment_elems()), chunks[host].elems);
    }
  }

  const ChunkedLayout& chunked_;
  const int num_hosts_;
  const Between& between_;
  const std::int64_t accumulator_bytes_;
  const std::unique_ptr<char[]> accumulators_;
};

std::int64_t SlotElems(const LocalWire& wire, const Bucket& bucket) {
  return static_cast<std::int64_t>(wire.arena->slot_bytes() / DTypeBytes(bucket.dtype));
}

}  // namespace

void LocalAllreduce(const LocalWire& wire, const Bucket& bucket) {
  const LinearLayout layout(bucket, wire.arena->local_size(), SlotElems(wire, bucket));
  TurnsOfOneHost(wire, bucket, layout).Run();
}

void LocalAllreduceAround(const LocalWire& wire, const Bucket& bucket, int num_hosts,
                          const Between& between) {
  const ChunkedLayout layout(bucket, wire.arena->local_size(), num_hosts, SlotElems(wire, bucket));
  TurnsOfHosts(wire, bucket, layout, num_hosts, between).Run();
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
