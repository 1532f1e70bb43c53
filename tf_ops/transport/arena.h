// The memory that the ranks of one host share for one generation: a bell, a mailbox, progress
// counters and data slots for each. Knows no tensor. The memory has no name in the file system, so
// nothing is left behind, however a process ends.
#ifndef KERAS_RING_TRANSPORT_ARENA_H_
#define KERAS_RING_TRANSPORT_ARENA_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/bell.h"

namespace keras_ring {

// One rank's view of the arena. Unless said otherwise only the rank's engine thread calls it.
// Progress counters only grow, and say which windows of the running collective a rank is done with;
// see collectives/local.h.
class Arena {
 public:
  // Windows that may be under way at once, each with a slot per rank: at least so many.
  static constexpr int kNumSlots = 4;
  // Where hosts are joined: some windows are in the rings while others are packed or copied out.
  static constexpr int kNumSlotsBetweenHosts = 8;

  enum Stage { kPacked, kReduced, kCopied, kNumStages };

  static std::size_t Bytes(int local_size, std::size_t slot_bytes, int num_slots = kNumSlots);

  // `memory` holds Bytes() zero bytes, aligned to a page, and is kept by `owner`.
  Arena(void* memory, std::shared_ptr<void> owner, int local_rank, int local_size,
        std::size_t slot_bytes, int num_slots = kNumSlots);

  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  std::size_t slot_bytes() const { return slot_bytes_; }
  int num_slots() const { return num_slots_; }

  // The bell of a local rank. Thread: any.
  Bell* bell(int local_rank) const;

  char* Slot(int local_rank, std::int64_t window) const;

  // How many windows a rank has done up to this stage since the beginning.
  std::int64_t Progress(int local_rank, Stage stage) const;
  // Tells the others, and wakes those that are asleep in a transfer.
  void SetProgress(Stage stage, std::int64_t windows);
  // Whether all ranks of the host have done so many.
  bool HaveAll(Stage stage, std::int64_t windows) const;

  // Windows used up by collectives so far; the same on all local ranks between collectives.
  std::int64_t first_window = 0;

  // Puts a message into the mailbox of a local rank, or keeps what does not fit for later.
  void Send(int local_rank, std::string message);
  // False when nothing complete has come.
  bool Recv(int* from_local_rank, std::string* message);
  // Tries once more to deliver; true when something still waits.
  bool HasUnsent();

  // The memory, to be kept beyond the arena's end.
  const std::shared_ptr<void>& owner() const { return owner_; }

 private:
  struct Cell;
  struct Unsent {
    std::string message;
    std::size_t sent = 0;
  };

  Cell& CellOf(int local_rank) const;
  // Delivers what fits of the oldest messages for a rank.
  void Deliver(int local_rank);

  char* const memory_;
  const std::shared_ptr<void> owner_;
  const int local_rank_;
  const int local_size_;
  const std::size_t slot_bytes_;
  const int num_slots_;
  std::vector<std::deque<Unsent>> unsent_;  // by receiver
  std::vector<std::string> incoming_;       // by sender, pieces so far
};

}  // namespace keras_ring

#endif  // KERAS_RING_TRANSPORT_ARENA_H_
