// The engine of one generation: takes requests from any thread, agrees with the other ranks on what
// runs when, runs it, and calls back. Failures never stay inside: every request ends in `done`.
#ifndef KERAS_RING_ENGINE_ENGINE_H_
#define KERAS_RING_ENGINE_ENGINE_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/options.h"
#include "engine/execute.h"
#include "engine/in_flight.h"
#include "engine/pause.h"
#include "engine/readiness.h"
#include "engine/request.h"
#include "engine/timeline.h"
#include "transport/transport.h"

namespace keras_ring {

// One thread at a time owns the transport: the engine's own, or, for a small request while the
// engine is idle, the one that submits, which saves waking another. The engine's thread has started
// when the constructor returns and has ended when Stop returns. A world of one needs neither:
// requests are carried out in Submit.
//
// When a rank fails, the generation is over for all: every waiting and later request ends with the
// same error, and the engine is to be thrown away.
class Engine : private Idle {
 public:
  Engine(std::unique_ptr<Transport> transport, const Options& options);
  ~Engine() override;  // calls Abandon when Stop was not called
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return transport_->rank(); }
  const Topology& topology() const { return transport_->topology(); }
  // What messages call this rank.
  int number() const { return topology().number_of[rank()]; }

  // Never blocks (but in a world of one). Thread: any.
  void Submit(Request request);

  // Leaves in agreement: requests that still wait end with an error, then the others are waited
  // for, asleep, until they have left too, since they may need this rank to pass messages on. False
  // when the generation has failed. Afterwards Submit refuses.
  bool Stop();

  // Writes a timeline into a folder from now on; throws Error(kInvalid) when it cannot. Thread:
  // any.
  void StartTimeline(const std::string& folder);
  void StopTimeline() { timelines_.Stop(); }

  // Leaves at once because this rank cannot go on; the others' requests fail with `reason`, e.g.
  // "its script raised ValueError: …".
  void Abandon(const std::string& reason);

 private:
  enum class Ending { kNone, kInAgreement, kAtOnce };

  void Run();
  // Whoever has the turn is the engine for the moment: its thread, or a caller of Submit.
  bool TakeTurn() { return !has_turn_.exchange(true); }
  // One round of the engine's work; how long to sleep before the next if nothing rings.
  std::chrono::microseconds Work();
  // Carries a small request out in the thread that submitted it, if the others are quick.
  void Help();
  bool IsOver();
  // Takes in what has been submitted and what the others say; tells them what is new.
  void Pump();
  void TakeSubmitted();
  void TakeEnding();
  void Handle(int peer, const std::string& bytes);
  void Apply(const Publication& publication, const std::string& bytes);
  void Depart(const Departure& departure);
  void RunBatch();
  void LookForLostPeer();
  std::chrono::microseconds NapWithoutNews();
  // Ends the generation with an error; `is_news`: the others have not heard of it.
  void Fail(const Status& status, bool is_news);
  Routes MakeRoutes();
  double NowS() const;

  // Idle: called between two looks at a transfer.
  void Step(std::uint32_t seen, bool rings) override;
  void Reset() override;
  void ExpectBulk() override { is_bulk_ = true; }

  const Options options_;
  const std::unique_ptr<Transport> transport_;
  const std::vector<TreePlace> places_;
  const TreePlace place_;
  Routes routes_;
  Stages stages_;  // of the transfer that is going on, while a timeline is written

  std::mutex mutex_;
  std::vector<Request> submitted_;  // guarded by mutex_
  Ending ending_ = Ending::kNone;   // guarded by mutex_
  std::string ending_reason_;       // guarded by mutex_

  std::atomic<bool> has_turn_{false};
  std::atomic<int> help_pass_{0};  // submissions that are not helped with before the next try
  std::atomic<int> help_passes_{0};

  // Whoever has the turn.
  Readiness readiness_;
  InFlight requests_;
  Timelines timelines_;
  std::set<int> departed_;  // ranks
  Status first_departure_;  // what requests end with from then on
  bool is_leaving_ = false;
  double leaving_since_s_ = 0;
  bool is_running_batch_ = false;
  bool is_helping_ = false;
  bool is_bulk_ = false;
  std::string running_label_;
  Status failure_;
  Pause pause_;
  double last_look_s_ = 0;
  double waits_since_s_ = 0;
  bool was_wait_reported_ = false;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_ENGINE_H_
