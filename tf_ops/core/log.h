// One line on standard error, written at once so that lines of several ranks do not mix. Only for
// what a person must see even if the process is about to be ended by somebody else.
#ifndef KERAS_RING_CORE_LOG_H_
#define KERAS_RING_CORE_LOG_H_

#include <unistd.h>

#include <string>

namespace keras_ring {

inline void LogLine(int rank, const std::string& text) {
  const std::string line = "[keras_ring] rank " + std::to_string(rank) + ": " + text + "\n";
  // There is nobody to tell when even this fails.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace keras_ring

#endif  // KERAS_RING_CORE_LOG_H_
