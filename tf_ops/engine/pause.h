// How a waiting thread gives its core away: a few microseconds of looking, then sleep, a little
// longer each time. On CPUs the cores belong to the model that is being trained.
#ifndef KERAS_RING_ENGINE_PAUSE_H_
#define KERAS_RING_ENGINE_PAUSE_H_

#include <algorithm>
#include <chrono>
#include <utility>

namespace keras_ring {

class Pause {
 public:
  using Clock = std::chrono::steady_clock;

  // News: the next wait begins afresh.
  void Reset() {
    is_waiting_ = false;
    bulk_nap_ = kLeastInBulk;
  }

  // How long to sleep before the next look; zero: look again at once. Sleeping a sixteenth of the
  // time already waited delays what comes by 6 % at most, and a rank that waits long sleeps long.
  std::chrono::microseconds Next(std::chrono::microseconds most) {
    const Clock::time_point now = Clock::now();
    if (!is_waiting_) {
      is_waiting_ = true;
      since_ = now;
    }
    const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(now - since_);
    if (waited < kLook) return std::chrono::microseconds::zero();
    return std::clamp(waited / 16, kLeast, most);
  }

  // How long to sleep while many pieces are under way. No looking: the other ranks of the host, or
  // the model, have use for the core.
  std::chrono::microseconds NextInBulk() {
    return std::exchange(bulk_nap_, std::min(2 * bulk_nap_, kMostInBulk));
  }

 private:
  // An exchange between two ranks that both look takes 1 to 5 us; a sleep costs 50 us at least.
  static constexpr std::chrono::microseconds kLook{40};
  static constexpr std::chrono::microseconds kLeast{20};

  // Twice as long each time. A message of 256 KiB takes 200 us on a wire of 10 Gbit/s.
  static constexpr std::chrono::microseconds kLeastInBulk{25};
  static constexpr std::chrono::microseconds kMostInBulk{200};

  std::chrono::microseconds bulk_nap_ = kLeastInBulk;
  bool is_waiting_ = false;
  Clock::time_point since_;
};

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_PAUSE_H_
