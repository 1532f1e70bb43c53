// Ranks as threads over the in-process transport, for tests of what runs over a transport.
#ifndef KERAS_RING_TESTS_NATIVE_RANKS_H_
#define KERAS_RING_TESTS_NATIVE_RANKS_H_

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/status.h"
#include "engine/execute.h"
#include "late_transport.h"
#include "transport/inprocess.h"

// Different for every rank and element, so that a mix-up of either shows.
inline std::int64_t Value(int rank, int size, std::int64_t element) {
  return element * size + rank;
}

// Runs `body(rank)` on a thread per rank and waits for all. Of several failures it throws the first
// again, for the others may be its consequence. `on_failure` is called at once, to wake ranks up.
inline void RunThreads(
    int size, const std::function<void(int)>& body,
    const std::function<void()>& on_failure = [] {}) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          if (first == nullptr) first = std::current_exception();
        }
        on_failure();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first != nullptr) std::rethrow_exception(first);
}

// Yields between two looks, and gives up when another rank has failed.
class TestIdle : public keras_ring::Idle {
 public:
  explicit TestIdle(const std::atomic<bool>* has_failed) : has_failed_(has_failed) {}

  void Step(std::uint32_t, bool) override {
    if (*has_failed_) throw keras_ring::Error(keras_ring::Code::kPeerLost, "another rank failed");
    std::this_thread::yield();
  }
  void Reset() override {}

 private:
  const std::atomic<bool>* const has_failed_;
};

enum class Sends { kAtOnce, kLate };

// Sizes are small, so that little data takes many messages and windows.
struct World {
  keras_ring::Topology topology;
  Sends sends = Sends::kAtOnce;
  std::int64_t segment_bytes = 64;
  std::size_t slot_bytes = 128;  // 0: no shared memory
};

inline World Ranks(int size, Sends sends = Sends::kAtOnce) {
  return World{keras_ring::Topology::OneHost(size), sends};
}

// The host of each rank. Hosts are numbered by their lowest rank.
inline World Hosts(const std::vector<int>& node_of, Sends sends = Sends::kAtOnce) {
  World world = Ranks(static_cast<int>(node_of.size()), sends);
  world.topology.node_of = node_of;
  return world;
}

// Runs `body` on every rank, with its wires. Late sends leave only when their receiver waits for
// them, and look at the memory at the last moment that the transport's contract allows.
inline void RunRanks(const World& world,
                     const std::function<void(const keras_ring::Routes&)>& body) {
  const keras_ring::Topology& topology = world.topology;
  keras_ring::InprocessHub hub(topology, world.slot_bytes);
  PostedReceives posted(topology.size());
  std::atomic<bool> has_failed{false};
  RunThreads(
      topology.size(),
      [&](int rank) {
        std::unique_ptr<keras_ring::Transport> transport = hub.Connect(rank);
        if (world.sends == Sends::kLate) {
          transport = std::make_unique<LateTransport>(std::move(transport), &posted);
        }
        TestIdle idle(&has_failed);
        keras_ring::Routes routes;
        routes.world = {transport.get(), &idle, world.segment_bytes, {}};
        for (int other = 0; other < topology.size(); ++other) routes.world.members.push_back(other);
        routes.between = keras_ring::BetweenHosts(routes.world);
        routes.local = {transport->arena(), &idle};
        body(routes);
      },
      [&has_failed] { has_failed = true; });
}

#endif  // KERAS_RING_TESTS_NATIVE_RANKS_H_
