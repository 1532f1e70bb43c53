#include "ops/xla_completions.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace keras_ring {
namespace {

unsigned NumCores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  return std::max(1, CPU_COUNT(&allowed));
}

}  // namespace

void XlaCompletions::Push(std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (tasks_.size() > num_idle_ && num_threads_ < NumCores()) {
    ++num_threads_;
    std::thread([this] { Run(); }).detach();
  }
  changed_.notify_one();
}

void XlaCompletions::Run() {
  prctl(PR_SET_NAME, "keras_ring_xla", 0, 0, 0);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++num_idle_;
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    --num_idle_;
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
}

XlaCompletions& TheXlaCompletions() {
  static auto* completions = new XlaCompletions;
  return *completions;
}

}  // namespace keras_ring
