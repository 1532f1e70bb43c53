#include "transport/kept.h"

#include <mutex>
#include <utility>
#include <vector>

namespace keras_ring {

void KeepForever(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  // Not destroyed at the end of the process, when the network may still be running.
  static auto* const kept = new std::vector<std::shared_ptr<void>>();
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace keras_ring
