// How a generation ends: in agreement, or because a rank is killed, gives up, stalls or stops.
#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <thread>

#include "check.h"
#include "engine/engine.h"
#include "engines.h"

namespace keras_ring {
namespace {

using check::Note;
using Clock = std::chrono::steady_clock;

std::vector<World> SomeWorlds() {
  std::vector<World> worlds = {Hosts({0, 0, 1, 1})};
  for (const int size : {2, 3, 5}) {
    worlds.push_back(Ranks(size));
    worlds.push_back(Ranks(size));
    worlds.back().slot_bytes = 0;
  }
  return worlds;
}

// Holds an engine's thread in the middle of a collective, as if its process were stopped.
class Gate {
 public:
  ~Gate() { Open(); }

  std::function<void()> Wait() {
    return [this] {
      is_reached_.set_value();
      opened_.wait();
    };
  }
  void AwaitReached() { CHECK(reached_.wait_for(kPatience) == std::future_status::ready); }
  void Open() {
    if (!std::exchange(is_open_, true)) open_.set_value();
  }

 private:
  std::promise<void> is_reached_;
  std::promise<void> open_;
  std::future<void> reached_ = is_reached_.get_future();
  std::shared_future<void> opened_ = open_.get_future().share();
  bool is_open_ = false;
};

void CheckLost(const CallPointer& call, const std::string& text) {
  CHECK_EQ(call->status().code, Code::kPeerLost);
  CHECK_HAS(call->status().message, text);
}

TEST("a killed rank is named on all others, whose waiting and later requests fail") {
  for (const World& world : SomeWorlds()) {
    for (int killed = 0; killed < world.topology.size(); ++killed) {
      const Note note("hosts ", world.topology.node_of, ", killed: rank ", killed);
      Engines engines(world);
      engines.CheckWorks({"before"});
      std::vector<CallPointer> calls;
      for (int rank = 0; rank < engines.size(); ++rank) {
        if (rank != killed) calls.push_back(Submit(engines[rank], {"x", Kind::kAllgather, 3}));
      }
      const auto start = Clock::now();
      engines.Kill(killed);
      const std::string text = check::Text("rank ", killed, " is gone: its process ended");
      for (const CallPointer& call : calls) {
        CheckLost(call, text);
        CHECK_HAS(call->status().message, "allgather 'x': ");
      }
      CHECK(Clock::now() - start < std::chrono::seconds(5));
      for (int rank = 0; rank < engines.size(); ++rank) {
        if (rank != killed) CheckLost(Submit(engines[rank], {"later"}), text);
      }
      for (int rank = 0; rank < engines.size(); ++rank) CHECK(!engines[rank]->Stop());
    }
  }
}

TEST("a rank killed in the middle of a transfer is named, and what is queued behind fails too") {
  for (const World& world : SomeWorlds()) {
    const int killed = world.topology.size() - 1;
    const Note note("hosts ", world.topology.node_of);
    Gate gate;
    Engines engines(world);
    std::vector<CallPointer> calls;
    for (int rank = 0; rank < engines.size(); ++rank) {
      Ask ask{"x", Kind::kAllgather, 100000};
      if (rank == killed) ask.in_allgather = gate.Wait();
      calls.push_back(Submit(engines[rank], ask));
    }
    gate.AwaitReached();
    for (int rank = 0; rank < engines.size(); ++rank) {
      if (rank != killed) calls.push_back(Submit(engines[rank], {"behind"}));
    }
    engines.Kill(killed);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (static_cast<int>(i) == killed) continue;
      CheckLost(calls[i], check::Text("rank ", killed, " is gone: its process ended"));
    }
    gate.Open();
  }
}

TEST("a rank that gives up says why to all others") {
  for (const World& world : SomeWorlds()) {
    for (int leaving = 0; leaving < world.topology.size(); ++leaving) {
      const Note note("hosts ", world.topology.node_of, ", leaving: rank ", leaving);
      Engines engines(world);
      std::vector<CallPointer> calls;
      for (int rank = 0; rank < engines.size(); ++rank) {
        const std::string name = rank == leaving ? "its own" : "x";
        calls.push_back(Submit(engines[rank], {name, Kind::kAllreduce, 4}));
      }
      engines[leaving]->Abandon("its script raised ValueError: bad data");
      const std::string text =
          check::Text("rank ", leaving, " is gone: its script raised ValueError: bad data");
      for (const CallPointer& call : calls) CheckLost(call, text);
      for (int rank = 0; rank < engines.size(); ++rank) {
        const CallPointer later = Submit(engines[rank], {"later"});
        if (rank == leaving) {
          CHECK_EQ(later->status().code, Code::kInvalid);
        } else {
          CheckLost(later, text);
        }
        CHECK(!engines[rank]->Stop());
      }
    }
  }
}

TEST("a rank that gives up while others transfer ends their wait") {
  Gate gate;
  Engines engines(Ranks(3));
  std::vector<CallPointer> calls;
  for (int rank = 0; rank < 3; ++rank) {
    Ask ask{"x", Kind::kAllgather, 100000};
    if (rank == 1) ask.in_allgather = gate.Wait();
    calls.push_back(Submit(engines[rank], ask));
  }
  gate.AwaitReached();
  engines[2]->Abandon("its script raised KeyError: 'x'");
  CheckLost(calls[0], "rank 2 is gone: its script raised KeyError: 'x'");
  CheckLost(calls[2], "rank 2 is gone: its script raised KeyError: 'x'");
  gate.Open();
  CheckLost(calls[1], "rank 2 is gone: its script raised KeyError: 'x'");
}

TEST("an engine that is thrown away without a word is a lost peer") {
  Engines engines(Ranks(2));
  const CallPointer call = Submit(engines[0], {"x"});
  engines.ThrowAway(1);
  CheckLost(call, "rank 1 is gone: its engine was thrown away");
}

TEST("a stall becomes an error on who waits, after the second limit; then all goes on") {
  Options options;
  options.stall_s = 0.2;
  options.stall_error_s = 0.6;
  for (const World& world : SomeWorlds()) {
    const Note note("hosts ", world.topology.node_of);
    Engines engines(world, options);
    engines.CheckWorks({"x#dense/kernel"});
    const int missing = engines.size() - 1;
    const auto start = Clock::now();
    std::vector<CallPointer> calls;
    for (int rank = 0; rank < missing; ++rank) {
      calls.push_back(Submit(engines[rank], {"x#dense/kernel"}));
    }
    for (const CallPointer& call : calls) {
      CHECK_EQ(call->status().code, Code::kTimeout);
      CHECK_HAS(call->status().message, "allreduce 'dense/kernel' has waited ");
      CHECK_HAS(call->status().message, check::Text("; missing ranks: ", missing, "; "));
    }
    CHECK(Clock::now() - start > std::chrono::milliseconds(550));
    CHECK(Clock::now() - start < std::chrono::seconds(5));
    engines.CheckWorks({"y"});
    engines.CheckWorks({"x#dense/kernel"});
  }
}

TEST("a request that goes on waiting after another was refused keeps its age") {
  Options options;
  options.stall_s = 0.4;
  options.stall_error_s = 1.2;
  for (const int num_ranks : {2, 3}) {
    Engines engines(Ranks(num_ranks), options);
    engines.CheckWorks({"waits"});  // known by number from now on
    const int last = num_ranks - 1;
    const auto start = Clock::now();
    const CallPointer waits = Submit(engines[last], {"waits"});
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
    for (int rank = 0; rank < num_ranks; ++rank) {
      Submit(engines[rank], {"refused", Kind::kAllreduce, 1 + rank});
    }
    CHECK_EQ(waits->status().code, Code::kTimeout);
    CHECK(Clock::now() - start < std::chrono::milliseconds(1900));
  }
}

TEST("a stall in the middle of a transfer becomes an error, too") {
  Options options;
  options.stall_s = 0.1;
  options.stall_error_s = 0.5;
  for (const World& world : SomeWorlds()) {
    const Note note("hosts ", world.topology.node_of);
    Gate gate;
    Engines engines(world, options);
    std::vector<CallPointer> calls;
    for (int rank = 0; rank < engines.size(); ++rank) {
      Ask ask{"x#embedding", Kind::kAllgather, 100000};
      if (rank == 0) ask.in_allgather = gate.Wait();
      calls.push_back(Submit(engines[rank], ask));
    }
    for (int rank = 1; rank < engines.size(); ++rank) {
      CHECK_EQ(calls[rank]->status().code, Code::kTimeout);
      CHECK_HAS(calls[rank]->status().message,
                "allgather 'embedding' is under way, but no data has come for ");
    }
    gate.Open();
    // It may have got all that it needs before the others gave up; but then it hears of that.
    calls[0]->status();
    CHECK(!Submit(engines[0], {"later"})->status().ok());
  }
}

TEST("stop in agreement waits for all; afterwards requests are refused") {
  for (const World& world : SomeWorlds()) {
    const Note note("hosts ", world.topology.node_of);
    Engines engines(world);
    engines.CheckWorks({"x"});
    CHECK_EQ(engines.StopAll(), std::vector<bool>(engines.size(), true));
    for (int rank = 0; rank < engines.size(); ++rank) {
      const CallPointer call = Submit(engines[rank], {"x"});
      CHECK_EQ(call->status().code, Code::kInvalid);
      CHECK_EQ(call->status().message,
               "allreduce 'x': keras_ring.shutdown() has been called; call keras_ring.init() "
               "first.");
    }
  }
}

TEST("a world of one stops at once and refuses afterwards") {
  Engines engines(Ranks(1));
  engines.CheckWorks({"x"});
  CHECK(engines[0]->Stop());
  CHECK_EQ(Submit(engines[0], {"x"})->status().code, Code::kInvalid);
}

TEST("who still calls when a rank has left is told that it left") {
  for (const World& world : SomeWorlds()) {
    for (int leaving = 0; leaving < world.topology.size(); ++leaving) {
      const Note note("hosts ", world.topology.node_of, ", leaving: rank ", leaving);
      Engines engines(world);
      std::vector<CallPointer> calls;
      for (int rank = 0; rank < engines.size(); ++rank) {
        if (rank != leaving) calls.push_back(Submit(engines[rank], {"x"}));
      }
      engines.OnEachRank([&](int rank) {
        if (rank != leaving) {
          const CallPointer& call = calls[rank < leaving ? rank : rank - 1];
          CheckLost(call, check::Text("rank ", leaving, " is gone: it called keras_ring.shutdown"));
          CheckLost(Submit(engines[rank], {"y"}), check::Text("rank ", leaving, " is gone"));
        }
        CHECK(engines[rank]->Stop());
      });
    }
  }
}

TEST("requests that wait when their own rank stops end, also if the others call them then") {
  std::minstd_rand random(1);
  for (int time = 0; time < 150; ++time) {
    Engines engines(Ranks(2 + time % 3));
    const int size = engines.size();
    std::vector<std::vector<CallPointer>> calls(size);
    std::vector<int> delays_us(size);
    for (int& delay_us : delays_us) delay_us = static_cast<int>(random() % 300);
    engines.OnEachRank([&](int rank) {
      std::this_thread::sleep_for(std::chrono::microseconds(delays_us[rank]));
      for (const char* name : {"a", "b", "c"}) calls[rank].push_back(Submit(engines[rank], {name}));
      CHECK(engines[rank]->Stop());
    });
    for (const auto& of_rank : calls) {
      for (const CallPointer& call : of_rank) {
        const Note note("time ", time, ": ", call->status().message);
        CHECK(call->HasEnded());
        CHECK(call->status().code != Code::kInternal && call->status().code != Code::kTimeout);
      }
    }
  }
}

TEST("generations follow each other") {
  for (int time = 0; time < 20; ++time) {
    Engines engines(Ranks(3));
    engines.CheckWorks({"x", Kind::kAllreduce, 100});
    CHECK_EQ(engines.StopAll(), std::vector<bool>(3, true));
  }
}

}  // namespace
}  // namespace keras_ring
