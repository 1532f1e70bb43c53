// What the engine of one rank did and when, as a trace that Perfetto and chrome://tracing open. One
// file per rank, readable at any moment and after a crash: lines are written whole.
#ifndef KERAS_RING_ENGINE_TIMELINE_H_
#define KERAS_RING_ENGINE_TIMELINE_H_

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/options.h"
#include "core/stages.h"
#include "engine/request.h"

namespace keras_ring {

// Thread: any. Times are those of steady_clock, in seconds.
class Timeline {
 public:
  // Creates a file in the folder that the options name: rank2.json, where 2 is this rank's
  // `number`, or of a process set or a later generation rank2_set1.json or rank2_generation2.json.
  // Times are written as time since 1970, so that the files of several ranks, and other traces, fit
  // together. Throws Error(kInvalid) when the file cannot be made.
  Timeline(const Options& options, int number, const std::string& describe);
  ~Timeline() { Close(); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // A request was called on this rank, and only later on all.
  void AddWait(const Request& request, double since_s, double until_s);
  // Requests were carried out as one transfer. Between the ranks of a host its stages alternate,
  // window by window, so each is written as a sum; what is left of an allreduce is the exchange
  // with other hosts.
  void AddRun(const std::vector<Request*>& bucket, double since_s, double until_s,
              const Stages& stages);

  // Writes what has been gathered when there is much of it, or when it has been kept for long.
  // Cheap otherwise. Called when there is nothing else to do.
  void Flush(double now_s);

  // Writes the rest and closes the file; what comes later is not written.
  void Close();

 private:
  std::string Microseconds(double engine_s) const;
  void Write();

  std::mutex mutex_;  // of what follows; who closes is not who adds
  std::FILE* file_;   // null: closed
  const int number_;
  const int track_;         // of this rank's process: where its transfers lie, one after the other
  const double offset_us_;  // from steady time to that since 1970
  std::string text_;
  std::int64_t num_waits_ = 0;
  double flushed_s_ = 0;
};

// The timelines of an engine, of which one at most is being written.
class Timelines {
 public:
  // Thread: any. Both end the timeline before.
  void Start(const Options& options, int number, const std::string& describe);
  void Stop();

  // Null while none is being written. The pointer stays good as long as this object.
  Timeline* current() const { return current_.load(std::memory_order_acquire); }

 private:
  std::atomic<Timeline*> current_{nullptr};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Timeline>> all_;  // guarded by mutex_
};

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_TIMELINE_H_
