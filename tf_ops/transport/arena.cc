#include "transport/arena.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace keras_ring {
namespace {

constexpr std::size_t kMailboxBytes = 32 * 1024;
// A lock is held for the copy of one piece. Whoever does not get it tries again later.
constexpr int kLockTries = 2000;

struct PieceHeader {
  std::int32_t sender = 0;
  std::uint32_t bytes = 0;
  std::uint32_t is_last = 0;
};

}  // namespace

struct Arena::Cell {
  Bell bell;
  struct alignas(64) Counter {
    std::atomic<std::int64_t> windows{0};
  };
  Counter progress[kNumStages];
  // The mailbox: a ring of bytes with many writers and one reader.
  alignas(64) std::atomic<std::uint32_t> lock{0};
  alignas(64) std::atomic<std::uint64_t> written{0};
  alignas(64) std::atomic<std::uint64_t> read{0};
  char mailbox[kMailboxBytes];
};

std::size_t Arena::Bytes(int local_size, std::size_t slot_bytes, int num_slots) {
  return local_size * (sizeof(Cell) + num_slots * slot_bytes);
}

Arena::Arena(void* memory, std::shared_ptr<void> owner, int local_rank, int local_size,
             std::size_t slot_bytes, int num_slots)
    : memory_(static_cast<char*>(memory)),
      owner_(std::move(owner)),
      local_rank_(local_rank),
      local_size_(local_size),
      slot_bytes_(slot_bytes),
      num_slots_(num_slots),
      unsent_(local_size),
      incoming_(local_size) {}

// The memory begins as zero bytes, which are valid cells: they need no construction, which could
// only be done by one rank before all others.
Arena::Cell& Arena::CellOf(int local_rank) const {
  return *reinterpret_cast<Cell*>(memory_ + local_rank * sizeof(Cell));
}

Bell* Arena::bell(int local_rank) const { return &CellOf(local_rank).bell; }

char* Arena::Slot(int local_rank, std::int64_t window) const {
  const std::size_t index = local_rank * num_slots_ + static_cast<std::size_t>(window % num_slots_);
  return memory_ + local_size_ * sizeof(Cell) + index * slot_bytes_;
}

std::int64_t Arena::Progress(int local_rank, Stage stage) const {
  return CellOf(local_rank).progress[stage].windows.load(std::memory_order_acquire);
}

void Arena::SetProgress(Stage stage, std::int64_t windows) {
  CellOf(local_rank_).progress[stage].windows.store(windows, std::memory_order_release);
  for (int other = 0; other < local_size_; ++other) {
    if (other != local_rank_) bell(other)->Nudge();
  }
}

bool Arena::HaveAll(Stage stage, std::int64_t windows) const {
  for (int other = 0; other < local_size_; ++other) {
    if (other != local_rank_ && Progress(other, stage) < windows) return false;
  }
  return true;
}

void Arena::Send(int local_rank, std::string message) {
  unsent_[local_rank].push_back(Unsent{std::move(message), 0});
  Deliver(local_rank);
}

bool Arena::HasUnsent() {
  bool has_unsent = false;
  for (int other = 0; other < local_size_; ++other) {
    if (unsent_[other].empty()) continue;
    Deliver(other);
    has_unsent = has_unsent || !unsent_[other].empty();
  }
  return has_unsent;
}

void Arena::Deliver(int local_rank) {
  Cell& cell = CellOf(local_rank);
  auto& unsent = unsent_[local_rank];
  const auto put = [&cell](std::uint64_t at, const void* from, std::size_t bytes) {
    const std::size_t begin = at % kMailboxBytes;
    const std::size_t first = std::min(bytes, kMailboxBytes - begin);
    std::memcpy(cell.mailbox + begin, from, first);
    std::memcpy(cell.mailbox, static_cast<const char*>(from) + first, bytes - first);
  };
  for (int tries = 0; cell.lock.exchange(1, std::memory_order_acquire) != 0;) {
    if (++tries == kLockTries) return;
  }
  std::uint64_t written = cell.written.load(std::memory_order_relaxed);
  while (!unsent.empty()) {
    Unsent& next = unsent.front();
    const std::size_t room = kMailboxBytes - (written - cell.read.load(std::memory_order_acquire));
    if (room <= sizeof(PieceHeader)) break;
    const std::size_t left = next.message.size() - next.sent;
    PieceHeader header;
    header.sender = local_rank_;
    header.bytes = static_cast<std::uint32_t>(std::min(left, room - sizeof header));
    header.is_last = header.bytes == left ? 1 : 0;
    put(written, &header, sizeof header);
    put(written + sizeof header, next.message.data() + next.sent, header.bytes);
    written += sizeof header + header.bytes;
    next.sent += header.bytes;
    if (header.is_last != 0) unsent.pop_front();
  }
  cell.written.store(written, std::memory_order_release);
  cell.lock.store(0, std::memory_order_release);
  cell.bell.Ring();
}

bool Arena::Recv(int* from_local_rank, std::string* message) {
  HasUnsent();
  Cell& cell = CellOf(local_rank_);
  const auto get = [&cell](std::uint64_t at, void* to, std::size_t bytes) {
    const std::size_t begin = at % kMailboxBytes;
    const std::size_t first = std::min(bytes, kMailboxBytes - begin);
    std::memcpy(to, cell.mailbox + begin, first);
    std::memcpy(static_cast<char*>(to) + first, cell.mailbox, bytes - first);
  };
  for (;;) {
    const std::uint64_t read = cell.read.load(std::memory_order_relaxed);
    if (cell.written.load(std::memory_order_acquire) == read) return false;
    PieceHeader header;
    get(read, &header, sizeof header);
    std::string& whole = incoming_[header.sender];
    const std::size_t before = whole.size();
    whole.resize(before + header.bytes);
    get(read + sizeof header, whole.data() + before, header.bytes);
    cell.read.store(read + sizeof header + header.bytes, std::memory_order_release);
    if (header.is_last == 0) continue;
    *from_local_rank = header.sender;
    *message = std::exchange(whole, {});
    return true;
  }
}

}  // namespace keras_ring
