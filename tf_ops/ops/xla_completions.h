// Threads that tell XLA that a call has ended. XLA goes on with its program on the very thread that
// tells it, so that must be neither the engine's, which would carry out nothing meanwhile, nor one
// that helps the engine.
#ifndef KERAS_RING_OPS_XLA_COMPLETIONS_H_
#define KERAS_RING_OPS_XLA_COMPLETIONS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace keras_ring {

// A task never waits behind another one as long as the process has a core for it: the first may be
// the rest of a training step. Threads are started when they are first needed and asleep without
// work; they end with the process.
class XlaCompletions {
 public:
  // Thread: any. Never blocks.
  void Push(std::function<void()> task);

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  unsigned num_threads_ = 0;                 // guarded by mutex_
  unsigned num_idle_ = 0;                    // guarded by mutex_
};

// Never destroyed: its threads may outlive static destructors.
XlaCompletions& TheXlaCompletions();

}  // namespace keras_ring

#endif  // KERAS_RING_OPS_XLA_COMPLETIONS_H_
