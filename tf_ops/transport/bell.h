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

// One thread sleeps on a bell, any may ring it. Nothing is missed: who sleeps names the count that
// it saw before it looked for news. All zero bytes are a bell that has never rung.
struct alignas(64) Bell {
  std::atomic<std::uint32_t> count{0};
  std::atomic<std::uint32_t> num_asleep{0};

  void Ring() {
    count.fetch_add(1);
    if (num_asleep.load() > 0) {
      syscall(SYS_futex, &count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  // Returns when the bell has rung since `seen`, after `most`, or early for no reason.
  void Sleep(std::uint32_t seen, std::chrono::microseconds most) {
    timespec timeout{};
    timeout.tv_sec = static_cast<std::time_t>(most.count() / 1000000);
    timeout.tv_nsec = static_cast<long>(most.count() % 1000000 * 1000);
    num_asleep.fetch_add(1);
    syscall(SYS_futex, &count, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    num_asleep.fetch_sub(1);
  }
};

static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "the kernel waits on four bytes");

}  // namespace keras_ring

#endif  // KERAS_RING_TRANSPORT_BELL_H_
