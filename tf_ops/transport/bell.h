// How one thread wakes another that sleeps, in this process or in another one that shares the
// memory: a counter of news that the kernel can wait on (a futex).
#ifndef KERAS_RING_TRANSPORT_BELL_H_
#define KERAS_RING_TRANSPORT_BELL_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace keras_ring {

// A rank's threads sleep on its bell, anybody may ring it. Nothing is missed: who sleeps names the
// count that it saw before it looked for news. All zero bytes are a bell that has never rung.
struct alignas(64) Bell {
  std::atomic<std::uint32_t> count{0};
  std::atomic<std::uint32_t> num_asleep{0};
  std::atomic<std::uint32_t> num_in_transfer{0};  // of those, who waits for a transfer to go on
  // A thread looks at the count all the time: there is no need to wake the others.
  std::atomic<std::uint32_t> is_attended{0};

  // There is something new to do.
  void Ring() {
    count.fetch_add(1);
    if (num_asleep.load() > 0 && is_attended.load() == 0) WakeAll();
  }

  // A transfer has gone on, which concerns only who is in the middle of it.
  void Nudge() {
    count.fetch_add(1);
    if (num_in_transfer.load() > 0) WakeAll();
  }

  // Returns when the bell has rung since `seen`, after `most`, or early for no reason.
  void Sleep(std::uint32_t seen, std::chrono::microseconds most, bool in_transfer) {
    timespec timeout{};
    timeout.tv_sec = static_cast<std::time_t>(most.count() / 1000000);
    timeout.tv_nsec = static_cast<long>(most.count() % 1000000 * 1000);
    num_asleep.fetch_add(1);
    if (in_transfer) num_in_transfer.fetch_add(1);
    syscall(SYS_futex, &count, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    if (in_transfer) num_in_transfer.fetch_sub(1);
    num_asleep.fetch_sub(1);
  }

 private:
  void WakeAll() { syscall(SYS_futex, &count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
};

static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "the kernel waits on four bytes");

}  // namespace keras_ring

#endif  // KERAS_RING_TRANSPORT_BELL_H_
