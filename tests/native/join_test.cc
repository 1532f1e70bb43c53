// Uneven work: ranks that have joined count as ready, bring nothing and change nothing.
#include <algorithm>
#include <random>
#include <set>
#include <string>

#include "agreement.h"
#include "check.h"
#include "dtypes.h"
#include "engine/engine.h"
#include "engines.h"
#include "reduce/neutral.h"

namespace keras_ring {
namespace {

using check::Note;
using Keys = std::vector<std::string>;

Signature Of(Kind kind, std::int32_t root = 0) {
  Signature signature;
  signature.kind = kind;
  signature.root = root;
  if (kind == Kind::kBarrier || kind == Kind::kJoin) return signature;
  signature.dtypes = {DType::kFloat32};
  signature.shapes = {{2}};
  return signature;
}

std::vector<Topology> SomeTopologies() {
  Topology hosts = Topology::OneHost(7);
  hosts.node_of = {0, 1, 0, 1, 2, 2, 2};
  return {Topology::OneHost(2), Topology::OneHost(3), Topology::OneHost(6), hosts};
}

bool IsJoined(int mask, int rank) { return (mask >> rank & 1) != 0; }

TEST("join: for every set of joined ranks, what the others call runs on all, known or not") {
  for (const Topology& topology : SomeTopologies()) {
    for (int mask = 1; mask < (1 << topology.size()) - 1; ++mask) {
      const Note note("hosts ", topology.node_of, ", joined ", mask);
      Agreement ranks(topology, Options{});
      for (int rank = 0; rank < ranks.size(); ++rank) {
        if (IsJoined(mask, rank)) ranks.Call(rank, "join", Of(Kind::kJoin));
      }
      for (int time = 0; time < 2; ++time) {
        for (int rank = 0; rank < ranks.size(); ++rank) {
          if (!IsJoined(mask, rank)) ranks.Call(rank, "x#label", Of(Kind::kAllreduce));
        }
        ranks.Settle();
      }
      for (int rank = 0; rank < ranks.size(); ++rank) {
        CHECK_EQ(ranks[rank].agreed, (Keys{"x", "x"}));
        CHECK_EQ(ranks[rank].stood_in.size(), IsJoined(mask, rank) ? 2u : 0u);
        for (const auto& ready : ranks[rank].stood_in) {
          CHECK_EQ(ready.name, "x#label");
          CHECK(*ready.signature == Of(Kind::kAllreduce));
        }
        if (!IsJoined(mask, rank)) ranks.Call(rank, "join", Of(Kind::kJoin));
      }
      ranks.Settle();
      ranks.CallOnAll("x#label", Of(Kind::kAllreduce));
      ranks.Settle();
      for (int rank = 0; rank < ranks.size(); ++rank) {
        CHECK_EQ(ranks[rank].agreed, (Keys{"x", "x", "join", "x"}));
        CHECK_EQ(ranks[rank].last_joined, ranks[0].last_joined);
        CHECK(!IsJoined(mask, ranks[rank].last_joined));
      }
    }
  }
}

TEST("join: nothing runs that a rank which has not joined has not called") {
  Agreement ranks(Topology::OneHost(4), Options{});
  ranks.Call(1, "join", Of(Kind::kJoin));
  ranks.Call(0, "x", Of(Kind::kAllreduce));
  ranks.Call(3, "x", Of(Kind::kAllreduce));
  ranks.Settle();
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks[rank].agreed, Keys{});
  ranks.Call(2, "join", Of(Kind::kJoin));
  ranks.Settle();
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks[rank].agreed, Keys{"x"});
}

TEST("join: what a rank had called before it joined stays its own call") {
  Agreement ranks(Topology::OneHost(3), Options{});
  ranks.Call(2, "x", Of(Kind::kAllreduce));
  for (const int rank : {2, 1}) ranks.Call(rank, "join", Of(Kind::kJoin));
  ranks.Call(0, "x", Of(Kind::kAllreduce));
  ranks.Settle();
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_EQ(ranks[rank].agreed, Keys{"x"});
    CHECK_EQ(ranks[rank].stood_in.size(), rank == 1 ? 1u : 0u);
  }
}

TEST("join: any uneven work, in any order of messages, with refusals, ends for all together") {
  std::minstd_rand random(7);
  for (const Topology& topology : SomeTopologies()) {
    for (const std::int64_t known_requests : {0, 2, 100}) {
      const Note note("hosts ", topology.node_of, ", ", known_requests, " known requests");
      Options options;
      options.known_requests = known_requests;
      Agreement ranks(topology, options);
      constexpr int kRounds = 5;
      // In each round a rank calls x so many times, then joins; the others' calls are one longer.
      std::vector<int> rounds(ranks.size(), 0);
      std::vector<int> calls(ranks.size(), 0);
      const auto work_of = [&](int rank, int round) { return (rank * 5 + round * 3) % 7; };
      int steps = 0;
      for (;;) {
        CHECK(++steps < 1000000);
        const int rank = static_cast<int>(random() % ranks.size());
        auto& own = ranks[rank];
        const int num_joins =
            static_cast<int>(std::count(own.agreed.begin(), own.agreed.end(), "join"));
        CHECK(num_joins >= rounds[rank] - 1);
        if (std::all_of(rounds.begin(), rounds.end(), [](int r) { return r == kRounds; }) &&
            num_joins == kRounds) {
          ranks.Settle();
          break;
        }
        switch (random() % 4) {
          case 0:
            if (rounds[rank] == kRounds || !own.waiting.empty()) break;
            if (calls[rank] < work_of(rank, rounds[rank])) {
              // In every round call number 3 is one that ranks disagree on.
              Signature signature = Of(Kind::kAllreduce);
              if (calls[rank] == 3) signature.shapes = {{rank + 1}};
              ranks.Call(rank, "x", signature);
              ++calls[rank];
            } else {
              ranks.Call(rank, "join", Of(Kind::kJoin));
              ++rounds[rank];
              calls[rank] = 0;
            }
            break;
          case 1:
            ranks.Speak(rank);
            break;
          case 2:
            ranks.CarryUp(rank);
            break;
          default:
            ranks.CarryDown(rank);
        }
      }
      for (int rank = 0; rank < ranks.size(); ++rank) {
        CHECK_EQ(ranks[rank].agreed, ranks[0].agreed);
        CHECK_EQ(std::count(ranks[rank].agreed.begin(), ranks[rank].agreed.end(), "join"), kRounds);
      }
    }
  }
}

TEST("join: what would lose data is refused on all, and the joined stay joined") {
  const std::vector<std::pair<Signature, std::string>> cases = {
      {Of(Kind::kAlltoall),
       "alltoall 'x': ranks 1, 2 have joined, and what it is to get would be lost. "},
      {Of(Kind::kReducescatter),
       "reducescatter 'x': ranks 1, 2 have joined, and what it is to get would be lost. "},
      {Of(Kind::kBroadcast, 2),
       "broadcast 'x': rank 2 has joined, and nobody else has its value. "}};
  for (const auto& [signature, message] : cases) {
    Agreement ranks(Topology::OneHost(4), Options{});
    for (const int rank : {1, 2}) ranks.Call(rank, "join", Of(Kind::kJoin));
    for (const int rank : {0, 3}) ranks.Call(rank, "x", signature);
    ranks.Settle();
    for (int rank = 0; rank < 4; ++rank) {
      CHECK_EQ(ranks[rank].refused.at(0).status.code, Code::kInvalid);
      CHECK_EQ(ranks[rank].refused.at(0).status.message,
               message + "Call join after the last such call of any rank.");
    }
    for (const int rank : {0, 3}) ranks.Call(rank, "y", Of(Kind::kBroadcast, 3));
    ranks.Settle();
    for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks[rank].agreed, Keys{"y"});
  }
}

TEST("join: a wait names who has neither called nor joined; a join waits while others go on") {
  Options options;
  options.stall_s = 10;
  options.stall_error_s = 40;
  Agreement ranks(Topology::OneHost(4), options);
  ranks.Call(2, "join", Of(Kind::kJoin));
  for (int time = 0; time < 30; ++time) {
    ranks.now_s += 5;
    for (const int rank : {0, 1, 3}) ranks.Call(rank, "x", Of(Kind::kAllreduce));
    ranks.Settle();
  }
  CHECK_EQ(ranks[0].reports.size(), 0u);
  CHECK_EQ(ranks[0].agreed.size(), 30u);
  ranks.Call(0, "x", Of(Kind::kAllreduce));
  ranks.Call(3, "x", Of(Kind::kAllreduce));
  ranks.Settle();
  ranks.now_s += 12;
  ranks.Settle();
  std::set<std::string> reports(ranks[1].reports.begin(), ranks[1].reports.end());
  CHECK_EQ(reports.size(), 2u);
  for (const std::string& report : reports) {
    const bool is_join = report.rfind("join 'join' has waited", 0) == 0;
    CHECK(report.find(is_join ? "missing ranks: 0, 1, 3;" : "missing ranks: 1;") !=
          std::string::npos);
  }
  ranks.now_s += 40;
  ranks.Settle();
  CHECK(!ranks[2].refused.empty());
  for (const Refused& refused : ranks[2].refused) CHECK_EQ(refused.status.code, Code::kTimeout);
}

// Submits a join; its result.
std::shared_ptr<std::pair<CallPointer, std::int32_t>> SubmitJoin(Engine* engine) {
  const auto join = std::make_shared<std::pair<CallPointer, std::int32_t>>(std::make_shared<Call>(),
                                                                           std::int32_t{-1});
  Request request;
  request.name = "join";
  request.signature.kind = Kind::kJoin;
  request.outputs = {&join->second};
  request.done = [join](const Status& status) { join->first->promise.set_value(status); };
  request.keep_alive = join;
  engine->Submit(std::move(request));
  return join;
}

TEST("join: engines with uneven work of every kind get what those who work bring") {
  World apart = Ranks(3);
  apart.slot_bytes = 0;
  for (const World& world : {Ranks(1), Ranks(2), Ranks(4), apart, Hosts({0, 0, 1, 1})}) {
    Engines engines(world);
    const int size = engines.size();
    const Note note("hosts ", world.topology.node_of, ", slots of ", world.slot_bytes);
    engines.OnEachRank([&](int rank) {
      Engine* const engine = engines[rank];
      for (int round = 0; round < 3; ++round) {
        // Rank r does r + 1 steps, so in step s the ranks from s on work.
        for (int step = 0; step <= rank; ++step) {
          std::int64_t sum_of_ranks = 0;
          std::vector<std::int64_t> gathered;
          for (int other = step; other < size; ++other) {
            sum_of_ranks += other;
            for (std::int64_t j = 0; j < 5; ++j) gathered.push_back(Value(other, size, j));
          }
          const auto sum = Submit(engine, {"sum", Kind::kAllreduce, 300});
          const auto rows = Submit(engine, {"rows", Kind::kAllgather, 5});
          const auto given = Submit(engine, {"given", Kind::kBroadcast, 9, size - 1});
          const auto barrier = Submit(engine, {"barrier", Kind::kBarrier});
          for (std::int64_t j = 0; j < 300; ++j) {
            CHECK_EQ(sum->result()[j], j * size * (size - step) + sum_of_ranks);
          }
          CHECK_EQ(rows->result(), gathered);
          for (std::int64_t j = 0; j < 9; ++j) {
            CHECK_EQ(given->result()[j], Value(size - 1, size, j));
          }
          barrier->result();
        }
        const auto join = SubmitJoin(engine);
        join->first->result();
        CHECK_EQ(join->second, size - 1);
      }
    });
    CHECK_EQ(engines.StopAll(), std::vector<bool>(size, true));
  }
}

TEST("join: a rank that waits in it may call nothing else, and goes on waiting") {
  Engines engines(Ranks(2));
  const auto first = SubmitJoin(engines[1]);
  const auto refused = Submit(engines[1], {"x#x/kernel"});
  CHECK_EQ(refused->status().code, Code::kInvalid);
  CHECK_EQ(refused->status().message,
           "allreduce 'x/kernel' was called on rank 1 while it waits in join. Call join after "
           "everything else.");
  CHECK_EQ(Submit(engines[0], {"y"})->result(), (std::vector<std::int64_t>{0}));
  CHECK(!first->first->HasEnded());
  const auto last = SubmitJoin(engines[0]);
  first->first->result();
  last->first->result();
  CHECK_EQ(first->second, 0);
  engines.CheckWorks({"next"});
}

TEST("neutral values leave every value as it is, in every dtype and operation") {
  for (const DType dtype : kAllDTypes) {
    for (const ReduceOp op : kAllOps) {
      if (!IsReducible(dtype, op)) continue;
      const Note note(DTypeName(dtype), " ", ReduceOpName(op));
      WithTypes(dtype, [&](auto storage, auto) {
        using T = decltype(storage);
        std::vector<char> values = Bytes(40, dtype);
        std::vector<char> neutral = Bytes(40, dtype);
        std::vector<char> result = Bytes(40, dtype);
        for (int j = 0; j < 40; ++j) Store(&values, j, FromInt<T>(j * 5 - 100));
        FillNeutral(dtype, op, neutral.data(), 40);
        Reduce(dtype, op, {neutral.data(), values.data()}, Scale{}, Scale{}, result.data(), 40);
        CHECK(result == values);
        Reduce(dtype, op, {values.data(), neutral.data()}, Scale{}, Scale{}, result.data(), 40);
        CHECK(result == values);
      });
    }
  }
}

}  // namespace
}  // namespace keras_ring
