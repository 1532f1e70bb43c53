#include <algorithm>
#include <cstring>

#include "collectives/local.h"
#include "collectives/schedule.h"
#include "collectives/windows.h"

namespace keras_ring {

void LocalAllgather(const LocalWire& wire, const void* input, const Pieces& outputs) {
  Arena& arena = *wire.arena;
  const int own = arena.local_rank();
  const auto slot_bytes = static_cast<std::int64_t>(arena.slot_bytes());
  const std::int64_t first = arena.first_window;
  std::int64_t num_windows = 0;
  std::int64_t all_bytes = 0;
  for (const MutableBytes& output : outputs) {
    const auto bytes = static_cast<std::int64_t>(output.bytes);
    all_bytes += bytes;
    num_windows = std::max(num_windows, (bytes + slot_bytes - 1) / slot_bytes);
  }
  const auto window_of = [&](int rank, std::int64_t window) {
    const auto bytes = static_cast<std::int64_t>(outputs[rank].bytes);
    return Range{std::min(window * slot_bytes, bytes), std::min((window + 1) * slot_bytes, bytes)};
  };
  const bool is_past_cache = IsPastCache(all_bytes);
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
    for (int rank = 0; rank < arena.local_size(); ++rank) {
      const Range range = window_of(rank, turn - 1);
      char* const to = static_cast<char*>(outputs[rank].data) + range.begin;
      const char* const source =
          rank == own ? from + range.begin : arena.Slot(rank, first + turn - 1);
      if (source == to) continue;
      CopyResult(to, source, range.elems(), is_past_cache);
    }
    arena.SetProgress(Arena::kCopied, first + turn);
  }
  FinishAt(wire, first + num_windows);
}

void LocalAllgather(const LocalWire& wire, const void* input,
                    const std::vector<std::int64_t>& block_bytes, void* output) {
  Pieces outputs;
  char* at = static_cast<char*>(output);
  for (const std::int64_t bytes : block_bytes) {
    outputs.push_back({at, static_cast<std::size_t>(bytes)});
    at += bytes;
  }
  LocalAllgather(wire, input, outputs);
}

void LocalBroadcast(const LocalWire& wire, int root, void* data, std::int64_t bytes,
                    const std::function<void(std::int64_t)>& await_until) {
  Arena& arena = *wire.arena;
  const auto slot_bytes = static_cast<std::int64_t>(arena.slot_bytes());
  const std::int64_t first = arena.first_window;
  const std::int64_t num_windows = (bytes + slot_bytes - 1) / slot_bytes;
  for (std::int64_t window = 0; window < num_windows; ++window) {
    char* const at = static_cast<char*>(data) + window * slot_bytes;
    const std::int64_t size = std::min(slot_bytes, bytes - window * slot_bytes);
    if (arena.local_rank() == root) {
      if (await_until != nullptr) await_until(window * slot_bytes + size);
      AwaitAll(wire, Arena::kCopied, first + window + 1 - Arena::kNumSlots);
      std::memcpy(arena.Slot(root, first + window), at, size);
      arena.SetProgress(Arena::kPacked, first + window + 1);
    } else {
      Await(wire, [&] { return arena.Progress(root, Arena::kPacked) >= first + window + 1; });
      CopyResult(at, arena.Slot(root, first + window), size, IsPastCache(bytes));
      arena.SetProgress(Arena::kCopied, first + window + 1);
    }
  }
  FinishAt(wire, first + num_windows);
}

}  // namespace keras_ring
