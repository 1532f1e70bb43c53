#include "collectives/local_parts.h"

#include <algorithm>
#include <complex>
#include <cstring>
#include <numeric>
#include <vector>

#include "collectives/bucket_view.h"
#include "collectives/schedule.h"
#include "collectives/windows.h"

namespace keras_ring {
namespace {

constexpr std::int64_t kLine = 64;
// A few windows at least, so that the ranks work beside each other, but none so small that telling
// each other costs more than the data.
constexpr std::int64_t kLeastPartBytes = 32 * 1024;

// How slots are cut into parts, and the windows that the largest block takes.
class PartWindows {
 public:
  // Parts hold whole units, of 1 to 16 bytes.
  PartWindows(const LocalWire& wire, std::int64_t largest_bytes, std::int64_t unit_bytes)
      : wire_(wire), arena_(*wire.arena), first_window_(arena_.first_window) {
    const std::int64_t others = std::max(1, arena_.local_size() - 1);
    const auto whole = [unit_bytes](std::int64_t bytes) {
      const std::int64_t step = bytes >= kLine ? kLine : unit_bytes;
      return std::max(unit_bytes, bytes / step * step);
    };
    const std::int64_t most = whole(static_cast<std::int64_t>(arena_.slot_bytes()) / others);
    part_bytes_ = std::clamp(whole(largest_bytes / Arena::kNumSlots + kLine),
                             std::min(most, kLeastPartBytes), most);
    num_windows_ = (largest_bytes + part_bytes_ - 1) / part_bytes_;
  }

  std::int64_t num_windows() const { return num_windows_; }

  // The bytes of a block of `block_bytes` that go through a window.
  Range Of(std::int64_t window, std::int64_t block_bytes) const {
    return Range{std::min(window * part_bytes_, block_bytes),
                 std::min((window + 1) * part_bytes_, block_bytes)};
  }

  // Where `from` has its part for `to`.
  char* At(std::int64_t window, int from, int to) const {
    return arena_.Slot(from, first_window_ + window) + (to < from ? to : to - 1) * part_bytes_;
  }

  // Packs each window, and takes the one before, so that it seldom waits. `others` are visited
  // beginning behind this rank, so that not all ranks read from the same one.
  template <typename Pack, typename Take>
  void Run(const Pack& pack, const Take& take) {
    for (std::int64_t turn = 0; turn < num_windows_ + 1; ++turn) {
      if (turn < num_windows_) {
        // The slot is free when nobody reads its former window any more.
        AwaitAll(wire_, Arena::kCopied, first_window_ + turn + 1 - Arena::kNumSlots);
        ForOthers([&](int other) { pack(turn, other); });
        arena_.SetProgress(Arena::kPacked, first_window_ + turn + 1);
      }
      if (turn == 0) continue;
      AwaitAll(wire_, Arena::kPacked, first_window_ + turn);
      take(turn - 1);
      arena_.SetProgress(Arena::kCopied, first_window_ + turn);
    }
    FinishAt(wire_, first_window_ + num_windows_);
  }

  template <typename Visit>
  void ForOthers(const Visit& visit) const {
    const int size = arena_.local_size();
    for (int step = 1; step < size; ++step) visit((arena_.local_rank() + step) % size);
  }

 private:
  const LocalWire& wire_;
  Arena& arena_;
  const std::int64_t first_window_;
  std::int64_t part_bytes_ = 0;
  std::int64_t num_windows_ = 0;
};

std::int64_t SumBelow(const std::vector<std::int64_t>& bytes, int end) {
  return std::accumulate(bytes.begin(), bytes.begin() + end, std::int64_t{0});
}

}  // namespace

bool HasRoomForParts(const Arena& arena) {
  return arena.slot_bytes() >= sizeof(std::complex<double>) * arena.local_size();
}

void LocalAlltoall(const LocalWire& wire, const Blocks& blocks, std::int64_t largest_bytes) {
  const int own = wire.arena->local_rank();
  const int size = wire.arena->local_size();
  PartWindows windows(wire, largest_bytes, /*unit_bytes=*/1);
  std::vector<const char*> sources;
  std::vector<char*> targets;
  for (int rank = 0; rank < size; ++rank) {
    sources.push_back(static_cast<const char*>(blocks.input) + SumBelow(blocks.send_bytes, rank));
    targets.push_back(static_cast<char*>(blocks.output) + SumBelow(blocks.recv_bytes, rank));
  }
  const bool is_past_cache = IsPastCache(SumBelow(blocks.recv_bytes, size));
  const auto copy_own = [&](std::int64_t turn, std::int64_t num_turns) {
    const Range range =
        PartOf(blocks.send_bytes[own], static_cast<int>(num_turns), static_cast<int>(turn));
    CopyResult(targets[own] + range.begin, sources[own] + range.begin, range.elems(),
               is_past_cache);
  };
  if (windows.num_windows() == 0) copy_own(0, 1);
  windows.Run(
      [&](std::int64_t window, int other) {
        const Range range = windows.Of(window, blocks.send_bytes[other]);
        if (range.elems() == 0) return;
        std::memcpy(windows.At(window, own, other), sources[other] + range.begin, range.elems());
      },
      [&](std::int64_t window) {
        windows.ForOthers([&](int other) {
          const Range range = windows.Of(window, blocks.recv_bytes[other]);
          CopyResult(targets[other] + range.begin, windows.At(window, other, own), range.elems(),
                     is_past_cache);
        });
        // What stays here, a piece at a time: the ranks keep in step.
        copy_own(window, windows.num_windows());
      });
}

void LocalReducescatter(const LocalWire& wire, const Bucket& bucket) {
  const int own = wire.arena->local_rank();
  const int size = wire.arena->local_size();
  const BucketView view(bucket, size);
  const auto elem_bytes = static_cast<std::int64_t>(DTypeBytes(bucket.dtype));
  const std::int64_t largest_bytes = view.max_chunk_elems() * elem_bytes;
  PartWindows windows(wire, largest_bytes, elem_bytes);
  // What of a rank's chunk goes through a window, in elements.
  const auto segment_of = [&](std::int64_t window, int rank) {
    const Range bytes = windows.Of(window, largest_bytes);
    return view.Clip(rank, Range{bytes.begin / elem_bytes, bytes.end / elem_bytes});
  };
  std::vector<const void*> operands(size);
  windows.Run(
      [&](std::int64_t window, int other) {
        char* const part = windows.At(window, own, other);
        for (const auto& span : view.Spans(other, segment_of(window, other))) {
          std::memcpy(part + span.offset * elem_bytes, span.input, span.elems * elem_bytes);
        }
      },
      [&](std::int64_t window) {
        for (const auto& span : view.Spans(own, segment_of(window, own))) {
          for (int rank = 0; rank < size; ++rank) {
            operands[rank] = rank == own ? static_cast<const void*>(span.input)
                                         : windows.At(window, rank, own) + span.offset * elem_bytes;
          }
          Reduce(bucket.dtype, bucket.op, operands, bucket.before, bucket.after, span.output,
                 span.elems);
        }
      });
}

}  // namespace keras_ring
