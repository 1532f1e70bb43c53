#include "engine/engine.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "collectives/select.h"
#include "core/log.h"
#include "engine/buckets.h"
#include "engine/checks.h"
#include "engine/execute.h"
#include "engine/messages.h"
#include "engine/stand_in.h"

namespace keras_ring {
namespace {

// While nothing of this rank waits, nobody waits for it either: what the others say may wait until
// the next look. Requests wake the thread at once.
constexpr std::chrono::microseconds kAtRest{20000};
// While requests wait for other ranks, or a transfer for data.
constexpr std::chrono::microseconds kInWait{1000};
constexpr std::chrono::microseconds kInTransfer{100};
// A request up to this size is carried out by the thread that submits it, if that takes no longer
// than kHelp: waking the engine's thread costs 20 to 50 us.
constexpr std::int64_t kSmallBytes = 32 * 1024;
constexpr std::chrono::microseconds kHelp{60};
constexpr int kMostPasses = 63;
// Seconds between two looks at whether the other processes are alive.
constexpr double kLookForLost_s = 0.05;
// Seconds that a rank which leaves at once spends on telling the others.
constexpr double kTellOthers_s = 1.0;

constexpr char kShutDown[] = "keras_ring.shutdown() has been called; call keras_ring.init() first.";

}  // namespace

Engine::Engine(std::unique_ptr<Transport> transport, const Options& options)
    : options_(options),
      transport_(std::move(transport)),
      places_(AgreementTree(transport_->topology())),
      place_(places_[transport_->rank()]),
      routes_(MakeRoutes()),
      readiness_(transport_->rank(), transport_->topology(), options) {
  if (!options_.timeline.empty()) StartTimeline(options_.timeline);
  if (transport_->size() > 1) thread_ = std::thread([this] { Run(); });
}

Engine::~Engine() { Abandon("its engine was thrown away"); }

Routes Engine::MakeRoutes() {
  const Topology& ranks = transport_->topology();
  // Alone, requests are carried out in the threads that submit them, side by side: nothing may be
  // shared between them.
  Arena* const arena = ranks.size() > 1 ? transport_->arena() : nullptr;
  Routes routes;
  routes.world = Wire{transport_.get(), this, options_.segment_bytes, {}};
  for (int other = 0; other < ranks.size(); ++other) routes.world.members.push_back(other);
  routes.between = BetweenHosts(routes.world);
  routes.local = LocalWire{arena, this};
  routes.allreduce =
      SelectAllreduce(options_.algorithm, ranks, arena == nullptr ? 0 : arena->slot_bytes());
  routes.movement = SelectMovement(ranks, arena == nullptr ? 0 : arena->slot_bytes());
  routes.is_one_host = arena != nullptr && ranks.num_nodes() == 1;
  return routes;
}

void Engine::StartTimeline(const std::string& folder) {
  Options options = options_;
  options.timeline = folder;
  timelines_.Start(options, number(), topology().describe[rank()]);
}

double Engine::NowS() const {
  return std::chrono::duration<double>(Pause::Clock::now().time_since_epoch()).count();
}

void Engine::Submit(Request request) {
  Status status = CheckCall(request, topology());
  if (status.ok()) status = CheckSplits(&request, transport_->size());
  if (!status.ok()) return request.done(status);
  // Where rows are open the others may bring more; mostly they do not.
  const bool is_small = OwnBytes(request) <= kSmallBytes;
  request.since_s = NowS();
  bool has_ended = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_ended = ending_ != Ending::kNone;
    if (!has_ended && transport_->size() > 1) {
      submitted_.push_back(std::move(request));
    }
  }
  if (!has_ended && transport_->size() > 1) {
    if (is_small && help_pass_.fetch_sub(1) <= 0 && TakeTurn()) return Help();
    return transport_->bell()->Ring();
  }
  if (has_ended) return request.done({Code::kInvalid, Describe(request) + ": " + kShutDown});
  try {
    Execute(routes_, {&request});
    request.done({});
  } catch (const Error& error) {
    request.done(error.status());
  }
}

bool Engine::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ending_ == Ending::kNone) ending_ = Ending::kInAgreement;
  }
  transport_->bell()->Ring();
  if (thread_.joinable()) {
    thread_.join();
  } else if (transport_->size() == 1) {
    transport_->Close();
  }
  return failure_.ok();
}

void Engine::Abandon(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ending_ == Ending::kNone || thread_.joinable()) {
      ending_ = Ending::kAtOnce;
      ending_reason_ = reason;
    }
  }
  transport_->bell()->Ring();
  if (thread_.joinable()) thread_.join();
}

void Engine::Run() {
  prctl(PR_SET_NAME, "keras_ring", 0, 0, 0);  // for profilers and `top -H`
  // The default slack of 50 us would make every short sleep a long one.
  prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
  for (;;) {
    const std::uint32_t seen = transport_->bell()->count.load();
    auto nap = kAtRest;
    if (TakeTurn()) {
      if (IsOver()) break;  // and the turn is not given back
      nap = Work();
      has_turn_ = false;
    }
    if (nap.count() > 0) transport_->bell()->Sleep(seen, nap, /*in_transfer=*/false);
  }
  TakeSubmitted();
  requests_.FailWaiting({Code::kInvalid, kShutDown});
}

std::chrono::microseconds Engine::Work() {
  try {
    Pump();
    if (!failure_.ok() || !requests_.has_batches()) return NapWithoutNews();
    RunBatch();
    pause_.Reset();
  } catch (const Error& error) {
    Fail(error.status(), /*is_news=*/true);
  }
  return std::chrono::microseconds::zero();
}

void Engine::Help() {
  Bell* const bell = transport_->bell();
  const Pause::Clock::time_point end = Pause::Clock::now() + kHelp;
  std::uint32_t seen = 0;
  bool is_done = false;
  is_helping_ = true;
  bell->is_attended = 1;
  do {
    seen = bell->count.load();
    Work();
    is_done = requests_.is_idle();
  } while (!is_done && failure_.ok() && Pause::Clock::now() < end);
  bell->is_attended = 0;
  is_helping_ = false;
  has_turn_ = false;
  // Where the others are often late, trying costs the model its core.
  help_passes_ = is_done ? 0 : std::min(2 * help_passes_ + 1, kMostPasses);
  help_pass_ = help_passes_.load();
  if (!is_done || bell->count.load() != seen) bell->Ring();
}

bool Engine::IsOver() {
  Ending ending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending = ending_;
  }
  if (ending == Ending::kNone) return false;
  if (!failure_.ok()) return true;
  if (ending == Ending::kAtOnce) return false;  // not before the others have been told: TakeEnding
  try {
    if (static_cast<int>(departed_.size()) == transport_->size() && !requests_.has_batches()) {
      if (transport_->HasUnsentControl()) return false;
      transport_->Close();
      return true;
    }
  } catch (const Error&) {
    return true;  // everybody had left anyway
  }
  return is_leaving_ && options_.stall_error_s > 0 &&
         NowS() - leaving_since_s_ > options_.stall_error_s;
}

void Engine::Pump() {
  TakeSubmitted();
  if (!failure_.ok()) return;
  TakeEnding();
  int peer = -1;
  std::string bytes;
  while (failure_.ok() && transport_->RecvControl(&peer, &bytes)) {
    pause_.Reset();
    Handle(peer, bytes);
  }
  if (!failure_.ok()) return;
  if (place_.parent >= 0) {
    if (const auto message = readiness_.TakeUpward(NowS())) {
      transport_->SendControl(place_.parent, Encode(*message));
    }
  } else {
    const bool may_agree = !is_running_batch_ && !requests_.has_batches();
    if (const auto publication = readiness_.TakePublication(may_agree, NowS())) {
      Apply(*publication, Encode(*publication));
    }
  }
  LookForLostPeer();
}

void Engine::TakeSubmitted() {
  std::vector<Request> submitted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    submitted.swap(submitted_);
  }
  if (submitted.empty()) return;
  pause_.Reset();
  for (Request& request : submitted) {
    const std::string key = KeyOf(request.name);
    Status status = failure_;
    if (status.ok()) status = first_departure_;
    if (!status.ok()) {
      status.message = Describe(request) + ": " + status.message;
    } else {
      status = requests_.Refusal(request, key, number());
    }
    if (status.ok() && readiness_.has_joined()) {
      status = {Code::kInvalid, Describe(request) + " was called on rank " +
                                    std::to_string(number()) +
                                    " while it waits in join. Call join after everything else."};
    }
    if (!status.ok()) {
      request.done(status);
      continue;
    }
    readiness_.AddOwn(request.name, request.signature, request.since_s);
    requests_.Add(key, std::move(request));
  }
}

void Engine::TakeEnding() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ending_ == Ending::kAtOnce) {
      throw Error(Code::kPeerLost, topology().describe[rank()] + " is gone: " + ending_reason_);
    }
    if (is_leaving_ || ending_ != Ending::kInAgreement) return;
  }
  is_leaving_ = true;
  leaving_since_s_ = NowS();
  // What this rank waits for may be agreed on before the others hear of this: see Depart.
  readiness_.AddDeparture({rank(), "it called keras_ring.shutdown(), or its script has ended"});
}

void Engine::Handle(int peer, const std::string& bytes) {
  switch (TypeOf(bytes)) {
    case MessageType::kUpward:
      return readiness_.AddFromChild(peer, DecodeUpward(bytes), NowS());
    case MessageType::kPublication:
      return Apply(DecodePublication(bytes), bytes);
    case MessageType::kFailure:
      return Fail(DecodeFailure(bytes).status, /*is_news=*/false);
  }
  throw Error(Code::kInternal, "a control message of unknown type arrived");
}

void Engine::Apply(const Publication& publication, const std::string& bytes) {
  for (const int child : place_.children) transport_->SendControl(child, bytes);
  std::vector<Request> batch;
  const bool had_joined = readiness_.has_joined();
  for (const Readiness::Ready& ready : readiness_.Apply(publication)) {
    if (auto request = requests_.TakeAgreed(ready.key)) {
      request->last_joined = publication.last_joined;
      if (Timeline* const timeline = timelines_.current()) {
        timeline->AddWait(*request, request->since_s, NowS());
      }
      batch.push_back(*std::move(request));
    } else if (had_joined) {
      batch.push_back(StandIn(ready.name, *ready.signature));
    } else {
      throw Error(Code::kInternal, "the ranks agreed on '" + ready.key + "', which rank " +
                                       std::to_string(number()) + " has not called");
    }
  }
  requests_.PushBatch(std::move(batch));
  for (const std::string& report : publication.reports) LogLine(number(), report);
  for (const Refused& refused : publication.refused) requests_.Refuse(refused);
  if (!publication.refused.empty()) {
    for (const auto& [key, request] : requests_.waiting()) {
      readiness_.AddOwn(request.name, request.signature, request.since_s);
    }
  }
  for (const Departure& departure : publication.departures) Depart(departure);
}

void Engine::Depart(const Departure& departure) {
  departed_.insert(departure.rank);
  if (departure.rank == rank()) return requests_.FailWaiting({Code::kInvalid, kShutDown});
  const Status status{Code::kPeerLost,
                      topology().describe[departure.rank] + " is gone: " + departure.reason};
  // Others may leave because the first did.
  if (first_departure_.ok()) first_departure_ = status;
  requests_.FailWaiting(status);
}

void Engine::RunBatch() {
  is_running_batch_ = true;
  std::vector<Request>& batch = requests_.front_batch();
  std::vector<const Signature*> signatures;
  for (const Request& request : batch) signatures.push_back(&request.signature);
  for (const auto& indices : PlanBuckets(signatures, options_.bucket_bytes)) {
    std::vector<Request*> bucket;
    for (const std::size_t index : indices) bucket.push_back(&batch[index]);
    running_label_ = Describe(*bucket.front());
    Reset();
    is_bulk_ = false;
    Timeline* const timeline = timelines_.current();
    const double since_s = timeline == nullptr ? 0 : NowS();
    stages_ = Stages{};
    routes_.world.stages = routes_.local.stages = timeline == nullptr ? nullptr : &stages_;
    Execute(routes_, bucket);
    if (timeline != nullptr) timeline->AddRun(bucket, since_s, NowS(), stages_);
    for (Request* request : bucket) requests_.Finish(request);
  }
  requests_.PopBatch();
  is_running_batch_ = false;
}

void Engine::LookForLostPeer() {
  const double now_s = NowS();
  if (now_s - last_look_s_ < kLookForLost_s) return;
  last_look_s_ = now_s;
  const int lost = transport_->FindLostPeer();
  if (lost < 0 || departed_.count(lost) > 0) return;
  // It may have said why, as the last thing it did.
  int peer = -1;
  std::string bytes;
  while (failure_.ok() && transport_->RecvControl(&peer, &bytes)) Handle(peer, bytes);
  if (!failure_.ok() || departed_.count(lost) > 0) return;
  throw Error(Code::kPeerLost, transport_->topology().describe[lost] +
                                   " is gone: its process ended without leaving (killed, or out "
                                   "of memory; look at its own output).");
}

std::chrono::microseconds Engine::NapWithoutNews() {
  if (Timeline* const timeline = timelines_.current()) timeline->Flush(NowS());
  if (!failure_.ok() || (requests_.waiting().empty() && !is_leaving_)) return kAtRest;
  const auto nap = pause_.Next(requests_.waiting().empty() ? kAtRest : kInWait);
  return nap.count() == 0 || transport_->MustPoll() ? nap : kAtRest;
}

void Engine::Step(std::uint32_t seen, bool rings) {
  Pump();
  if (!failure_.ok()) throw Error(failure_.code, failure_.message);
  const double now_s = NowS();
  if (waits_since_s_ == 0) waits_since_s_ = now_s;
  const double waited_s = now_s - waits_since_s_;
  if (waited_s > options_.stall_s) {
    const std::string text = running_label_ + " is under way, but no data has come for " +
                             std::to_string(static_cast<int>(waited_s)) +
                             " s: a rank is stopped, or the network is down.";
    if (options_.stall_error_s > 0 && waited_s > options_.stall_error_s) {
      throw Error(Code::kTimeout, text);
    }
    if (!std::exchange(was_wait_reported_, true)) LogLine(number(), text);
  }
  // Who waits for what rings has looked for a while already.
  const auto nap = rings && !transport_->MustPoll() ? kAtRest
                   : is_bulk_                       ? pause_.NextInBulk()
                                                    : pause_.Next(kInTransfer);
  if (nap.count() == 0) return;
  Bell* const bell = transport_->bell();
  if (is_helping_) bell->is_attended = 0;
  bell->Sleep(seen, nap, /*in_transfer=*/true);
  if (is_helping_) bell->is_attended = 1;
}

void Engine::Reset() {
  pause_.Reset();
  waits_since_s_ = 0;
  was_wait_reported_ = false;
}

void Engine::Fail(const Status& status, bool is_news) {
  if (!failure_.ok()) return;
  failure_ = status;
  const bool is_mine = is_news && status.message.rfind(topology().describe[rank()], 0) == 0;
  if (!is_mine) {
    LogLine(number(), status.message + (running_label_.empty() || !is_running_batch_
                                            ? ""
                                            : " (during " + running_label_ + ")"));
  }
  requests_.FailBatches(status);
  is_running_batch_ = false;
  requests_.FailWaiting(status);
  TakeSubmitted();
  if (!is_news) return;
  try {
    for (int peer = 0; peer < transport_->size(); ++peer) {
      if (peer != rank() && departed_.count(peer) == 0) {
        transport_->SendControl(peer, Encode(Failure{status}));
      }
    }
    const double since_s = NowS();
    while (transport_->HasUnsentControl() && NowS() - since_s < kTellOthers_s) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const Error&) {
    // A peer that cannot be told notices by itself.
  }
}

}  // namespace keras_ring
