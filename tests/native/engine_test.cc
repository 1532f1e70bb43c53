#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <thread>

#include "check.h"
#include "engines.h"

namespace keras_ring {
namespace {

using check::Note;

const std::vector<Kind> kKinds = {Kind::kAllreduce, Kind::kAllgather, Kind::kBroadcast,
                                  Kind::kBarrier};

// Small messages and buckets, so that little data takes every path.
Options SmallOptions() {
  Options options;
  options.segment_bytes = 64;
  options.bucket_bytes = 1000;
  return options;
}

std::vector<World> SomeWorlds() {
  std::vector<World> worlds = {Hosts({0, 0, 1, 1}), Hosts({0, 1, 0})};
  for (const int size : {1, 2, 3, 5}) {
    worlds.push_back(Ranks(size));
    worlds.push_back(Ranks(size));
    worlds.back().slot_bytes = 0;
  }
  return worlds;
}

TEST("every kind gives its result on every rank") {
  for (const World& world : SomeWorlds()) {
    Engines engines(world, SmallOptions());
    for (const Kind kind : kKinds) {
      for (const std::int64_t elems : {0, 1, 7, 1009}) {
        const Note note(KindName(kind), " of ", elems, " on hosts ", world.topology.node_of,
                        ", slots of ", world.slot_bytes);
        Ask ask{"x", kind, elems};
        ask.root = engines.size() - 1;
        engines.CheckWorks(ask);
      }
    }
    CHECK_EQ(engines.StopAll(), std::vector<bool>(engines.size(), true));
  }
}

TEST("ranks may submit in different orders") {
  for (const World& world : SomeWorlds()) {
    Engines engines(world, SmallOptions());
    std::vector<Ask> asks;
    for (int i = 0; i < 40; ++i) {
      asks.push_back({"name " + std::to_string(i), kKinds[i % 4], i * 7});
    }
    for (int time = 0; time < 3; ++time) {
      std::vector<std::vector<CallPointer>> calls(engines.size(),
                                                  std::vector<CallPointer>(asks.size()));
      engines.OnEachRank([&](int rank) {
        std::vector<std::size_t> order(asks.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), std::minstd_rand(rank + 10 * time));
        for (const std::size_t i : order) calls[rank][i] = Submit(engines[rank], asks[i]);
      });
      for (const auto& of_rank : calls) {
        for (std::size_t i = 0; i < asks.size(); ++i) {
          CHECK_EQ(of_rank[i]->result(), Expected(asks[i], engines.size()));
        }
      }
    }
  }
}

TEST("fused or not, a tensor's sum is the same") {
  for (const std::int64_t bucket_bytes : {1, 100, 1 << 20}) {
    Options options = SmallOptions();
    options.bucket_bytes = bucket_bytes;
    Engines engines(Ranks(3), options);
    std::vector<std::vector<CallPointer>> calls;
    for (int i = 0; i < 50; ++i) {
      calls.push_back(engines.SubmitOnAll({"x" + std::to_string(i), Kind::kAllreduce, i}));
    }
    for (int i = 0; i < 50; ++i) {
      for (const CallPointer& call : calls[i]) {
        CHECK_EQ(call->result(), Expected({"", Kind::kAllreduce, i}, 3));
      }
    }
  }
}

TEST("a grouped request has several tensors") {
  Engines engines(Ranks(3), SmallOptions());
  const std::vector<std::int64_t> sizes = {5, 0, 301};
  engines.OnEachRank([&](int rank) {
    std::vector<std::vector<std::int64_t>> values;
    Request request;
    request.name = "group";
    request.signature.kind = Kind::kAllreduce;
    request.signature.is_mean = true;
    for (const std::int64_t elems : sizes) values.emplace_back(elems, 10 * elems + rank);
    for (auto& tensor : values) {
      request.signature.dtypes.push_back(DType::kInt64);
      request.signature.shapes.push_back({static_cast<std::int64_t>(tensor.size())});
      request.inputs.push_back(tensor.data());
      request.outputs.push_back(tensor.data());
    }
    std::promise<Status> promise;
    request.done = [&promise](const Status& status) { promise.set_value(status); };
    engines[rank]->Submit(std::move(request));
    CHECK(promise.get_future().get().ok());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      CHECK_EQ(values[i], std::vector<std::int64_t>(sizes[i], 10 * sizes[i] + 1));
    }
  });
}

TEST("a request without tensors ends well, in any world") {
  for (const World& world : SomeWorlds()) {
    Engines engines(world, SmallOptions());
    for (const Kind kind : kKinds) {
      const Note note(KindName(kind), " on hosts ", world.topology.node_of);
      std::vector<std::future<Status>> answers;
      for (int rank = 0; rank < engines.size(); ++rank) {
        const auto promise = std::make_shared<std::promise<Status>>();
        answers.push_back(promise->get_future());
        Request request;
        request.name = "nothing";
        request.signature.kind = kind;
        request.done = [promise](const Status& status) { promise->set_value(status); };
        engines[rank]->Submit(std::move(request));
      }
      for (auto& answer : answers) CHECK_EQ(answer.get().message, std::string());
    }
  }
}

TEST("a second call under a name in flight is refused, the first is not harmed") {
  Engines engines(Ranks(2));
  const CallPointer first = Submit(engines[0], {"x#dense/kernel"});
  const CallPointer second = Submit(engines[0], {"x#another label"});
  CHECK_EQ(second->status().code, Code::kInvalid);
  CHECK_HAS(second->status().message,
            "allreduce 'another label' was called while a call under the same name 'x' had not "
            "ended on rank 0");
  CHECK(!first->HasEnded());
  Submit(engines[1], {"x#dense/kernel"});
  CHECK_EQ(first->result(), Expected({"x"}, 2));
  engines.CheckWorks({"x"});
}

TEST("what this rank can see to be wrong is refused at once, with the remedy") {
  for (const int size : {1, 2}) {
    Engines engines(Ranks(size));
    Ask broadcast{"x", Kind::kBroadcast};
    for (const int root : {-1, size}) {
      broadcast.root = root;
      const CallPointer call = Submit(engines[0], broadcast);
      CHECK_EQ(call->status().code, Code::kInvalid);
      CHECK_EQ(call->status().message, check::Text("broadcast 'x': root_rank is ", root,
                                                   "; expected a rank from 0 to ", size - 1, "."));
    }
    const auto refusal = [&](Kind kind, ReduceOp op, bool is_mean, DType dtype, Shape shape) {
      Request request;
      request.name = "x";
      request.signature.kind = kind;
      request.signature.op = op;
      request.signature.is_mean = is_mean;
      request.signature.dtypes = {dtype};
      request.signature.shapes = {std::move(shape)};
      Status got;
      request.done = [&got](const Status& status) { got = status; };
      engines[0]->Submit(std::move(request));
      CHECK_EQ(got.code, Code::kInvalid);
      return got.message;
    };
    CHECK_EQ(refusal(Kind::kAllreduce, ReduceOp::kSum, true, DType::kBool, {1}),
             "allreduce 'x': op='mean' has no meaning for dtype bool; use op='min' (all) or "
             "'max' (any).");
    CHECK_EQ(refusal(Kind::kAllreduce, ReduceOp::kMax, false, DType::kComplex64, {1}),
             "allreduce 'x': op='max' has no meaning for dtype complex64; use op='sum', 'mean' or "
             "'product'.");
    CHECK_EQ(refusal(Kind::kAllgather, ReduceOp::kSum, false, DType::kInt32, {}),
             "allgather 'x' takes tensors with at least one dimension, but tensor 0 is a scalar; "
             "reshape it to (1,).");
    engines.CheckWorks({"x"});
  }
}

TEST("ranks that disagree all get both values within a second, and the next request works") {
  for (const World& world : SomeWorlds()) {
    Engines engines(world);
    if (engines.size() == 1) continue;
    for (int time = 0; time < 3; ++time) {
      const auto start = std::chrono::steady_clock::now();
      std::vector<CallPointer> calls;
      for (int rank = 0; rank < engines.size(); ++rank) {
        calls.push_back(Submit(engines[rank], {"x", Kind::kAllreduce, rank == 1 ? 3 : 2}));
      }
      for (const CallPointer& call : calls) {
        CHECK_EQ(call->status().code, Code::kMismatch);
        CHECK_HAS(call->status().message, "allreduce 'x': ranks disagree on shape: ");
        CHECK_HAS(call->status().message, "rank 1 has (3,)");
        CHECK_HAS(call->status().message, engines.size() == 2 ? "rank 0 has (2,)" : " have (2,)");
      }
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(1));
      engines.CheckWorks({"x"});
      engines.CheckWorks({"y", Kind::kAllgather, 5});
    }
  }
}

TEST("in a world of one, requests of many threads at once do not touch each other") {
  Engines engines(Ranks(1));
  RunThreads(4, [&](int thread) {
    for (int i = 0; i < 500; ++i) {
      const Ask ask{check::Text("x ", thread), kKinds[(thread + i) % 4], 100 * thread + i};
      CHECK_EQ(Submit(engines[0], ask)->result(), Expected(ask, 1));
    }
  });
}

TEST("when a request fails, what waits in the same run of the graph is given up everywhere") {
  Engines engines(Ranks(2));
  const auto ask = [](const std::string& name, std::int64_t elems, std::int64_t run) {
    Ask made{name, Kind::kAllreduce, elems};
    made.run = run;
    return made;
  };
  // A run has another number on each rank.
  const CallPointer waits = Submit(engines[0], ask("waits", 1, 70));
  const CallPointer other_run = Submit(engines[0], ask("other", 1, 71));
  const CallPointer no_run = Submit(engines[0], ask("none", 1, 0));
  const CallPointer bad_0 = Submit(engines[0], ask("bad", 1, 70));
  const CallPointer bad_1 = Submit(engines[1], ask("bad", 2, 90));
  CHECK_EQ(bad_0->status().code, Code::kMismatch);
  CHECK_EQ(bad_1->status().code, Code::kMismatch);
  CHECK_EQ(waits->status().code, Code::kMismatch);
  CHECK_HAS(waits->status().message,
            "allreduce 'waits' was given up, because allreduce 'bad' of the same run of the graph "
            "failed: allreduce 'bad': ranks disagree on shape");
  const CallPointer late = Submit(engines[1], ask("waits", 1, 90));
  CHECK_EQ(late->status().code, Code::kMismatch);
  CHECK_HAS(late->status().message,
            "allreduce 'waits' was given up, because allreduce 'bad' of the same run of the graph "
            "failed: allreduce 'bad': ranks disagree on shape");
  CHECK(!other_run->HasEnded());
  CHECK(!no_run->HasEnded());
  Submit(engines[1], ask("other", 1, 91));
  Submit(engines[1], ask("none", 1, 0));
  CHECK_EQ(other_run->result(), Expected({"x"}, 2));
  CHECK_EQ(no_run->result(), Expected({"x"}, 2));
  engines.CheckWorks({"waits"});
}

TEST("thousands of requests, mixed, in different orders, some refused, more names than numbers") {
  // Names are called one after the other on a rank, but the ranks are in different places.
  constexpr int kNames = 23;
  constexpr int kTimes = 25;
  const auto ask_of = [](int name, int time) {
    Ask ask{"name " + std::to_string(name) + "#label", kKinds[(name + time / 9) % 4]};
    ask.elems = (name * 37 + time * 11) % 90 == 0 ? 1500 : (name * 5 + time) % 40;
    ask.root = 1;
    return ask;
  };
  const auto is_refused = [](int name, int time) { return (name * 3 + time) % 17 == 0; };
  for (const World& world : SomeWorlds()) {
    if (world.topology.size() == 1) continue;
    const Note note("hosts ", world.topology.node_of);
    Options options = SmallOptions();
    options.known_requests = 9;
    Engines engines(world, options);
    const int size = engines.size();
    engines.OnEachRank([&](int rank) {
      std::minstd_rand random(rank);
      std::vector<int> times(kNames, 0);
      std::vector<CallPointer> calls(kNames);
      const auto end = [&](int name) {
        const int time = times[name]++;
        const Ask ask = ask_of(name, time);
        const Note in_thread(KindName(ask.kind), " ", ask.name, " of ", ask.elems, ", time ", time);
        if (is_refused(name, time)) {
          CHECK_EQ(calls[name]->status().code, Code::kMismatch);
        } else {
          CHECK_EQ(calls[name]->result(), Expected(ask, size));
        }
        calls[name] = nullptr;
      };
      const auto deadline = std::chrono::steady_clock::now() + kPatience;
      for (int left = kNames * kTimes; left > 0;) {
        const int name = static_cast<int>(random() % kNames);
        if (times[name] == kTimes) continue;
        if (calls[name] != nullptr) {
          // Waiting for one would keep this rank from calling what the others wait for.
          if (!calls[name]->HasEnded()) {
            CHECK(std::chrono::steady_clock::now() < deadline);
            std::this_thread::yield();
            continue;
          }
          end(name);
          --left;
          continue;
        }
        Ask ask = ask_of(name, times[name]);
        if (is_refused(name, times[name]) && rank == name % size) {
          ask.kind = ask.kind == Kind::kBarrier ? Kind::kAllreduce : Kind::kBarrier;
        }
        calls[name] = Submit(engines[rank], ask);
      }
    });
    CHECK_EQ(engines.StopAll(), std::vector<bool>(size, true));
  }
}

}  // namespace
}  // namespace keras_ring
