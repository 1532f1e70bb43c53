#include "engine/in_flight.h"

#include <utility>

namespace keras_ring {
namespace {

// Runs of a graph that failed; only the few that may still be winding down matter.
constexpr std::size_t kFailedRuns = 64;

}  // namespace

const InFlight::FailedRun* InFlight::FindFailed(std::int64_t run) const {
  for (const FailedRun& failed : failed_runs_) {
    if (run != 0 && failed.run == run) return &failed;
  }
  return nullptr;
}

Status InFlight::Refusal(const Request& request, const std::string& key, int number) const {
  if (waiting_.count(key) > 0 || running_.count(key) > 0) {
    return {Code::kInvalid, Describe(request) + " was called while a call under the same name '" +
                                key + "' had not ended on rank " + std::to_string(number) +
                                ". Give calls that run side by side names of their own."};
  }
  if (const FailedRun* const failed = FindFailed(request.run)) {
    return {failed->status.code, Describe(request) + failed->status.message};
  }
  return {};
}

void InFlight::Add(const std::string& key, Request request) {
  waiting_.emplace(key, std::move(request));
}

std::optional<Request> InFlight::TakeAgreed(const std::string& key) {
  running_.insert(key);
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return std::nullopt;
  std::optional<Request> request(std::move(found->second));
  waiting_.erase(found);
  return request;
}

void InFlight::PushBatch(std::vector<Request> batch) {
  if (!batch.empty()) batches_.push_back(std::move(batch));
}

void InFlight::Finish(Request* request) {
  running_.erase(KeyOf(request->name));
  std::exchange(request->done, nullptr)({});
}

void InFlight::Refuse(const Refused& refused) {
  const auto found = waiting_.find(refused.key);
  if (found == waiting_.end()) return;
  const std::int64_t run = found->second.run;
  const std::string label = Describe(found->second);
  found->second.done(refused.status);
  waiting_.erase(found);
  if (run == 0) return;
  const Status status{refused.status.code,
                      " was given up, because " + label +
                          " of the same run of the graph failed: " + refused.status.message};
  failed_runs_.push_back({run, status});
  if (failed_runs_.size() > kFailedRuns) failed_runs_.pop_front();
  for (auto other = waiting_.begin(); other != waiting_.end();) {
    if (other->second.run != run) {
      ++other;
      continue;
    }
    other->second.done({status.code, Describe(other->second) + status.message});
    other = waiting_.erase(other);
  }
}

void InFlight::FailWaiting(const Status& status) {
  for (auto& [key, request] : std::exchange(waiting_, {})) {
    request.done({status.code, Describe(request) + ": " + status.message});
  }
}

void InFlight::FailBatches(const Status& status) {
  for (auto& batch : batches_) {
    for (Request& request : batch) {
      if (request.done == nullptr) continue;
      std::exchange(request.done,
                    nullptr)({status.code, Describe(request) + ": " + status.message});
      abandoned_.push_back(std::move(request));
    }
  }
  batches_.clear();
}

}  // namespace keras_ring
