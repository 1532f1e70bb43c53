// How long a collective spends in each of its stages, measured only while somebody asks for it.
#ifndef KERAS_RING_CORE_STAGES_H_
#define KERAS_RING_CORE_STAGES_H_

#include <array>
#include <chrono>
#include <cstdint>

namespace keras_ring {

enum class Stage : std::uint8_t {
  kWait,    // for other ranks of the host
  kPack,    // copies what others read into shared memory
  kReduce,  // sums up
  kUnpack,  // copies results into tensors
};
inline constexpr int kNumStages = 4;

struct Stages {
  std::array<double, kNumStages> seconds{};

  double operator[](Stage stage) const { return seconds[static_cast<int>(stage)]; }
};

// Adds the time of its life to a stage. Stages do not nest. Free of cost with nullptr.
class StageTimer {
 public:
  StageTimer(Stages* stages, Stage stage) : stages_(stages), stage_(stage) {
    if (stages_ != nullptr) since_ = Clock::now();
  }
  ~StageTimer() {
    if (stages_ == nullptr) return;
    const std::chrono::duration<double> took = Clock::now() - since_;
    stages_->seconds[static_cast<int>(stage_)] += took.count();
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  Stages* const stages_;
  const Stage stage_;
  Clock::time_point since_;
};

}  // namespace keras_ring

#endif  // KERAS_RING_CORE_STAGES_H_
