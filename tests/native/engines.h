// Engines of all ranks in one process, and requests with their memory.
#ifndef KERAS_RING_TESTS_NATIVE_ENGINES_H_
#define KERAS_RING_TESTS_NATIVE_ENGINES_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "ranks.h"
#include "transport/inprocess.h"

// Waits shorter than the harness's limit, so that the failure says what did not come.
constexpr std::chrono::seconds kPatience{40};

// A request on one rank: its memory and how it ended.
class Call {
 public:
  std::vector<std::int64_t> input;
  std::vector<std::int64_t> output;
  std::promise<keras_ring::Status> promise;

  bool HasEnded() const { return answer_.wait_for(std::chrono::seconds(0)) == Ready(); }
  const keras_ring::Status& status() const {
    CHECK(answer_.wait_for(kPatience) == Ready());
    return answer_.get();
  }
  // Ends the test when the request ended in an error.
  const std::vector<std::int64_t>& result() const {
    CHECK_EQ(status().message, std::string());
    return output;
  }

 private:
  static std::future_status Ready() { return std::future_status::ready; }

  const std::shared_future<keras_ring::Status> answer_ = promise.get_future().share();
};

using CallPointer = std::shared_ptr<Call>;

// What a test says about a request; elements are int64.
struct Ask {
  std::string name;
  keras_ring::Kind kind = keras_ring::Kind::kAllreduce;
  std::int64_t elems = 1;
  std::int32_t root = 0;
  std::int64_t run = 0;
  // Called by the engine's thread in the middle of an allgather.
  std::function<void()> in_allgather = [] {};
};

// Input values as in ranks.h; an allgather brings `elems` rows of one element.
inline CallPointer Submit(keras_ring::Engine* engine, const Ask& ask) {
  const auto call = std::make_shared<Call>();
  const int size = engine->topology().size();
  for (std::int64_t j = 0; j < ask.elems; ++j) {
    call->input.push_back(Value(engine->rank(), size, j));
  }
  keras_ring::Request request;
  request.name = ask.name;
  request.run = ask.run;
  request.signature.kind = ask.kind;
  request.signature.root = ask.root;
  if (ask.kind != keras_ring::Kind::kBarrier) {
    const bool is_allgather = ask.kind == keras_ring::Kind::kAllgather;
    request.signature.dtypes = {keras_ring::DType::kInt64};
    request.signature.shapes = {{is_allgather ? -1 : ask.elems}};
    request.inputs = {call->input.data()};
    if (is_allgather) {
      request.rows = {ask.elems};
      request.allocate = [call, ask](std::size_t, std::int64_t rows) {
        ask.in_allgather();
        call->output.resize(rows);
        return static_cast<void*>(call->output.data());
      };
    } else {
      call->output.resize(ask.elems);
      request.outputs = {call->output.data()};
    }
  }
  request.done = [call](const keras_ring::Status& status) { call->promise.set_value(status); };
  request.keep_alive = call;
  engine->Submit(std::move(request));
  return call;
}

// What every rank shall hold after `ask`, when all ranks ask with as many elements.
inline std::vector<std::int64_t> Expected(const Ask& ask, int size) {
  std::vector<std::int64_t> wanted;
  for (std::int64_t j = 0; j < ask.elems; ++j) {
    switch (ask.kind) {
      case keras_ring::Kind::kAllreduce:
        wanted.push_back(j * size * size + size * (size - 1) / 2);
        break;
      case keras_ring::Kind::kBroadcast:
        wanted.push_back(Value(ask.root, size, j));
        break;
      case keras_ring::Kind::kAllgather:
      case keras_ring::Kind::kAlltoall:
      case keras_ring::Kind::kReducescatter:
      case keras_ring::Kind::kJoin:
      case keras_ring::Kind::kBarrier:
        break;
    }
  }
  for (int rank = 0; rank < size && ask.kind == keras_ring::Kind::kAllgather; ++rank) {
    for (std::int64_t j = 0; j < ask.elems; ++j) wanted.push_back(Value(rank, size, j));
  }
  return wanted;
}

class Engines {
 public:
  explicit Engines(const World& world, const keras_ring::Options& options = {})
      : hub_(world.topology, world.slot_bytes) {
    for (int rank = 0; rank < world.topology.size(); ++rank) {
      engines_.push_back(std::make_unique<keras_ring::Engine>(hub_.Connect(rank), options));
    }
  }

  int size() const { return static_cast<int>(engines_.size()); }
  keras_ring::Engine* operator[](int rank) { return engines_[rank].get(); }

  void Kill(int rank) { hub_.Kill(rank); }
  void ThrowAway(int rank) { engines_[rank] = nullptr; }

  // Runs `body(rank)` on a thread per rank. When one fails the others are not left waiting for it.
  void OnEachRank(const std::function<void(int)>& body) {
    RunThreads(size(), body, [this] { Kill(0); });
  }

  std::vector<CallPointer> SubmitOnAll(const Ask& ask) {
    std::vector<CallPointer> calls;
    for (const auto& engine : engines_) calls.push_back(Submit(engine.get(), ask));
    return calls;
  }

  void CheckWorks(const Ask& ask) {
    for (const CallPointer& call : SubmitOnAll(ask)) {
      CHECK_EQ(call->result(), Expected(ask, size()));
    }
  }

  // Whether all could leave in agreement.
  std::vector<bool> StopAll() {
    std::vector<char> has_stopped(size());
    OnEachRank([&](int rank) { has_stopped[rank] = engines_[rank]->Stop() ? 1 : 0; });
    return std::vector<bool>(has_stopped.begin(), has_stopped.end());
  }

 private:
  keras_ring::InprocessHub hub_;
  std::vector<std::unique_ptr<keras_ring::Engine>> engines_;
};

#endif  // KERAS_RING_TESTS_NATIVE_ENGINES_H_
