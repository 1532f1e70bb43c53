#include "transport/arena.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "check.h"
#include "ranks.h"

namespace keras_ring {
namespace {

constexpr std::size_t kSlotBytes = 64;

// The views of all local ranks on one arena.
class Shared {
 public:
  explicit Shared(int local_size) {
    const std::size_t bytes = (Arena::Bytes(local_size, kSlotBytes) + 4095) / 4096 * 4096;
    const std::shared_ptr<void> memory(std::aligned_alloc(4096, bytes), std::free);
    std::memset(memory.get(), 0, bytes);
    for (int rank = 0; rank < local_size; ++rank) {
      views_.push_back(std::make_unique<Arena>(memory.get(), memory, rank, local_size, kSlotBytes));
    }
  }
  Arena& operator[](int local_rank) { return *views_[local_rank]; }

 private:
  std::vector<std::unique_ptr<Arena>> views_;
};

std::string Message(int sender, int receiver, int number, std::size_t bytes) {
  std::string text = check::Text(sender, ">", receiver, "#", number, " ");
  while (text.size() < bytes) text += static_cast<char>('a' + (text.size() * 7 + number) % 26);
  return text;
}

TEST("a mailbox gives what was put in, with the sender, in order") {
  Shared arenas(3);
  arenas[0].Send(1, "first");
  arenas[2].Send(1, "");
  arenas[0].Send(1, "second");
  int from = -1;
  std::string message;
  CHECK(arenas[1].Recv(&from, &message));
  CHECK_EQ(from, 0);
  CHECK_EQ(message, "first");
  CHECK(arenas[1].Recv(&from, &message));
  CHECK_EQ(from, 2);
  CHECK_EQ(message, "");
  CHECK(arenas[1].Recv(&from, &message));
  CHECK_EQ(message, "second");
  CHECK(!arenas[1].Recv(&from, &message));
  CHECK(!arenas[0].Recv(&from, &message));
}

TEST("a message larger than the mailbox arrives in pieces, between others") {
  Shared arenas(3);
  const std::string large = Message(0, 1, 0, 200000);
  arenas[0].Send(1, large);
  arenas[2].Send(1, "small");
  arenas[0].Send(1, "behind");
  CHECK(arenas[0].HasUnsent());
  std::vector<std::string> from_0;
  std::vector<std::string> from_2;
  while (from_0.size() < 2 || from_2.empty()) {
    int from = -1;
    std::string message;
    if (arenas[1].Recv(&from, &message)) (from == 0 ? from_0 : from_2).push_back(message);
    arenas[0].HasUnsent();
    arenas[2].HasUnsent();
  }
  CHECK(from_0 == (std::vector<std::string>{large, "behind"}));
  CHECK(from_2 == std::vector<std::string>{"small"});
  CHECK(!arenas[0].HasUnsent());
}

TEST("many writers at once: every message arrives whole, once and in its sender's order") {
  constexpr int kSize = 4;
  constexpr int kMessages = 400;
  Shared arenas(kSize);
  RunThreads(kSize, [&](int rank) {
    Arena& own = arenas[rank];
    std::vector<int> next(kSize, 0);
    int received = 0;
    int sent = 0;
    while (received < kMessages * (kSize - 1) || sent < kMessages || own.HasUnsent()) {
      if (sent < kMessages) {
        const std::size_t bytes = sent % 50 == 0 ? 70000 : sent % 300;
        for (int other = 0; other < kSize; ++other) {
          if (other != rank) own.Send(other, Message(rank, other, sent, bytes));
        }
        ++sent;
      }
      int from = -1;
      std::string message;
      while (own.Recv(&from, &message)) {
        const int number = next[from]++;
        const std::size_t bytes = number % 50 == 0 ? 70000 : number % 300;
        CHECK(message == Message(from, rank, number, bytes));
        ++received;
      }
      std::this_thread::yield();
    }
  });
}

TEST("progress: a stage is done when all others have done it, own progress not counted") {
  Shared arenas(3);
  CHECK(arenas[0].HaveAll(Arena::kPacked, 0));
  CHECK(!arenas[0].HaveAll(Arena::kPacked, 1));
  arenas[1].SetProgress(Arena::kPacked, 1);
  CHECK(!arenas[0].HaveAll(Arena::kPacked, 1));
  arenas[2].SetProgress(Arena::kPacked, 2);
  CHECK(arenas[0].HaveAll(Arena::kPacked, 1));
  CHECK(!arenas[0].HaveAll(Arena::kPacked, 2));
  CHECK(!arenas[0].HaveAll(Arena::kReduced, 1));
  CHECK_EQ(arenas[0].Progress(2, Arena::kPacked), 2);
}

TEST("slots: four of each rank, none over another's") {
  Shared arenas(3);
  std::vector<char*> slots;
  for (int rank = 0; rank < 3; ++rank) {
    for (int window = 0; window < Arena::kNumSlots; ++window) {
      slots.push_back(arenas[0].Slot(rank, window));
      CHECK_EQ(arenas[2].Slot(rank, window + Arena::kNumSlots) - slots.back(), 0);
    }
  }
  for (std::size_t i = 1; i < slots.size(); ++i) {
    CHECK_EQ(slots[i] - slots[i - 1], static_cast<std::ptrdiff_t>(kSlotBytes));
  }
}

TEST("a bell wakes who sleeps on it, and nobody sleeps through news that came before") {
  using std::chrono::steady_clock;
  Shared arenas(2);
  Bell* const bell = arenas[0].bell(0);
  const auto start = steady_clock::now();
  const std::uint32_t seen = bell->count.load();
  arenas[1].SetProgress(Arena::kPacked, 1);
  bell->Sleep(seen, std::chrono::seconds(30), /*in_transfer=*/false);  // has rung already
  RunThreads(2, [&](int rank) {
    const std::uint32_t before = bell->count.load();
    if (rank == 0) {
      while (bell->count.load() == before)
        bell->Sleep(before, std::chrono::seconds(30), /*in_transfer=*/false);
    } else {
      while (bell->num_asleep.load() == 0) std::this_thread::yield();
      arenas[1].Send(0, "news");
    }
  });
  CHECK(steady_clock::now() - start < std::chrono::seconds(20));
}

}  // namespace
}  // namespace keras_ring
