// The requests of this rank from the moment the engine has taken them until they are done: waiting
// for other ranks, agreed on in batches, or given up. Every request ends in exactly one `done`.
#ifndef KERAS_RING_ENGINE_IN_FLIGHT_H_
#define KERAS_RING_ENGINE_IN_FLIGHT_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "engine/messages.h"
#include "engine/request.h"

namespace keras_ring {

// Whoever has the engine's turn calls it.
class InFlight {
 public:
  using Waiting = std::map<std::string, Request>;  // by key

  const Waiting& waiting() const { return waiting_; }
  bool has_batches() const { return !batches_.empty(); }
  std::vector<Request>& front_batch() { return batches_.front(); }
  bool is_idle() const { return waiting_.empty() && batches_.empty(); }

  // Why the request may not be taken, beside others that are under way. `number`: of this rank.
  Status Refusal(const Request& request, const std::string& key, int number) const;
  void Add(const std::string& key, Request request);

  // The ranks have agreed on it: it leaves those that wait. None if this rank has not called it.
  std::optional<Request> TakeAgreed(const std::string& key);
  void PushBatch(std::vector<Request> batch);
  // Ends a request of the first batch well.
  void Finish(Request* request);
  void PopBatch() { batches_.pop_front(); }

  // The ranks have refused one; those of the same run of a graph are given up with it.
  void Refuse(const Refused& refused);

  // Ends those that wait with an error.
  void FailWaiting(const Status& status);
  // Ends the agreed ones with an error, and keeps what they point to until this object's end: the
  // network may still write to it.
  void FailBatches(const Status& status);

 private:
  struct FailedRun {
    std::int64_t run;
    Status status;  // the message goes on after what was given up
  };
  const FailedRun* FindFailed(std::int64_t run) const;

  Waiting waiting_;                           // called on this rank, not agreed yet
  std::set<std::string> running_;             // keys agreed and not done
  std::deque<std::vector<Request>> batches_;  // agreed, in order
  std::vector<Request> abandoned_;
  std::deque<FailedRun> failed_runs_;
};

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_IN_FLIGHT_H_
