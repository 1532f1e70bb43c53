#include "engine/readiness.h"

#include <algorithm>
#include <random>
#include <string>

#include "agreement.h"
#include "check.h"

namespace keras_ring {
namespace {

using check::Note;
using Keys = std::vector<std::string>;

Signature Allreduce(const Shape& shape, DType dtype = DType::kFloat32) {
  Signature signature;
  signature.kind = Kind::kAllreduce;
  signature.dtypes = {dtype};
  signature.shapes = {shape};
  return signature;
}

Topology HostsOf(const std::vector<int>& node_of) {
  Topology topology = Topology::OneHost(static_cast<int>(node_of.size()));
  topology.node_of = node_of;
  return topology;
}

std::vector<Topology> SomeTopologies() {
  return {Topology::OneHost(1), Topology::OneHost(2), Topology::OneHost(5),
          HostsOf({0, 1, 0, 1, 2, 2, 2}), HostsOf({0, 1, 2, 3, 4, 5})};
}

// The one refusal that every rank has got, the same everywhere.
Status OnlyRefusal(Agreement* ranks, const std::string& key) {
  const Status status = (*ranks)[0].refused.at(0).status;
  for (int rank = 0; rank < ranks->size(); ++rank) {
    const Note note("rank ", rank);
    CHECK_EQ((*ranks)[rank].refused.size(), 1u);
    CHECK_EQ((*ranks)[rank].refused[0].key, key);
    CHECK_EQ((*ranks)[rank].refused[0].status.message, status.message);
    CHECK_EQ((*ranks)[rank].agreed, Keys{});
  }
  return status;
}

std::string Disagreement(const std::vector<Signature>& of_rank, const std::string& name = "x") {
  Agreement ranks(Topology::OneHost(static_cast<int>(of_rank.size())), Options{});
  for (int rank = 0; rank < ranks.size(); ++rank) ranks.Call(rank, name, of_rank[rank]);
  ranks.Settle();
  const Status status = OnlyRefusal(&ranks, KeyOf(name));
  CHECK_EQ(status.code, Code::kMismatch);
  return status.message;
}

TEST("a request runs everywhere once the last rank has called it, not before") {
  for (const Topology& topology : SomeTopologies()) {
    const Note note("hosts ", topology.node_of);
    for (int last = 0; last < topology.size(); ++last) {
      Agreement ranks(topology, Options{});
      for (int rank = 0; rank < ranks.size(); ++rank) {
        if (rank != last) ranks.Call(rank, "x", Allreduce({2}));
      }
      ranks.Settle();
      for (int rank = 0; rank < ranks.size(); ++rank) CHECK_EQ(ranks[rank].agreed, Keys{});
      ranks.Call(last, "x", Allreduce({2}));
      ranks.Settle();
      for (int rank = 0; rank < ranks.size(); ++rank) CHECK_EQ(ranks[rank].agreed, Keys{"x"});
    }
  }
}

TEST("the first time a name costs its description, later times one number") {
  Agreement ranks(Topology::OneHost(2), Options{});
  for (int time = 0; time < 3; ++time) {
    ranks.Call(1, "x#label", Allreduce({2}));
    const auto message = ranks[1].readiness->TakeUpward(ranks.now_s);
    CHECK_EQ(message->named.size(), time == 0 ? 1u : 0u);
    CHECK_EQ(message->known.size(), time == 0 ? 0u : 1u);
    ranks[1].upward.push_back(Encode(*message));
    ranks.Call(0, "x#label", Allreduce({2}));
    ranks.Settle();
    CHECK_EQ(ranks[0].agreed.size(), time + 1u);
    CHECK_EQ(ranks[1].agreed.size(), time + 1u);
  }
}

TEST("a call that is wrong on one rank fails on every rank, and says on which") {
  const auto with_problem = [](const std::string& problem) {
    Signature signature = Allreduce({2});
    signature.problem = problem;
    return signature;
  };
  Agreement ranks(Topology::OneHost(4), Options{});
  for (const int wrong : {0, 3}) {
    for (int rank = 0; rank < 4; ++rank) {
      ranks.Call(rank, "x#label", with_problem(rank == wrong ? "splits do not fit" : ""));
    }
    ranks.Settle();
    for (int rank = 0; rank < 4; ++rank) {
      CHECK_EQ(ranks[rank].refused.back().status.code, Code::kInvalid);
      CHECK_EQ(ranks[rank].refused.back().status.message,
               "allreduce 'label': rank " + std::to_string(wrong) +
                   " has called it wrongly: its splits do not fit");
    }
  }
  ranks.CallOnAll("x", with_problem("tensor is odd"));
  ranks.Settle();
  CHECK_EQ(ranks[2].refused.back().status.message,
           "allreduce 'x': ranks 0, 1, 2, 3 have called it wrongly: its tensor is odd");
  ranks.CallOnAll("x", with_problem(""));
  ranks.Settle();
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(ranks[rank].agreed, Keys{"x"});
}

TEST("any order of calls and messages: the same agreements and refusals on every rank, in order") {
  std::minstd_rand random(1);
  for (const Topology& topology : SomeTopologies()) {
    for (const std::int64_t known_requests : {0, 1, 3, 100}) {
      const Note note("hosts ", topology.node_of, ", ", known_requests, " known requests");
      Options options;
      options.known_requests = known_requests;
      Agreement ranks(topology, options);
      constexpr int kNames = 7;
      constexpr int kTimes = 30;
      // What each rank has called: every name so many times, in an order of its own.
      std::vector<std::vector<int>> times(ranks.size(), std::vector<int>(kNames, 0));
      const auto has_ended = [&](int rank) {
        return ranks[rank].agreed.size() + ranks[rank].refused.size() == kNames * kTimes;
      };
      const auto all_have_ended = [&] {
        for (int rank = 0; rank < ranks.size(); ++rank) {
          if (!has_ended(rank)) return false;
        }
        return true;
      };
      int steps = 0;
      while (!all_have_ended()) {
        CHECK(++steps < 2000000);
        const int rank = static_cast<int>(random() % ranks.size());
        const int name = static_cast<int>(random() % kNames);
        switch (random() % 4) {
          case 0: {
            const std::string key = "name " + std::to_string(name);
            int& time = times[rank][name];
            if (time == kTimes || ranks[rank].waiting.count(key) > 0) break;
            // Every fourth time with another shape; every fifth time rank 0 has one of its own.
            const bool is_wrong = rank == 0 && (time + name) % 5 == 0;
            ranks.Call(rank, key + "#label", Allreduce({is_wrong ? 9 : time % 4 == 0 ? 2 : 3}));
            ++time;
            break;
          }
          case 1:
            ranks.Speak(rank, /*may_agree=*/random() % 2 == 0);
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
        for (std::size_t i = 0; i < ranks[0].refused.size(); ++i) {
          CHECK_EQ(ranks[rank].refused.at(i).key, ranks[0].refused[i].key);
        }
        CHECK_EQ(ranks[rank].refused.size(), topology.size() == 1 ? 0u : kNames * kTimes / 5u);
      }
    }
  }
}

TEST("a busy wire starts nothing, but refusals go out") {
  Agreement ranks(Topology::OneHost(2), Options{});
  ranks.CallOnAll("good", Allreduce({1}));
  ranks.Settle(/*may_agree=*/false);
  CHECK_EQ(ranks[1].agreed, Keys{});
  ranks.Call(0, "bad", Allreduce({1}));
  ranks.Call(1, "bad", Allreduce({2}));
  ranks.Settle(/*may_agree=*/false);
  CHECK_EQ(ranks[1].refused.size(), 1u);
  CHECK_EQ(ranks[1].agreed, Keys{});
  ranks.Settle();
  CHECK_EQ(ranks[0].agreed, Keys{"good"});
  CHECK_EQ(ranks[1].agreed, Keys{"good"});
}

TEST("a number keeps its meaning for messages that are late") {
  Options options;
  options.known_requests = 1;
  Agreement ranks(Topology::OneHost(2), options);
  ranks.CallOnAll("x", Allreduce({2}));
  ranks.Settle();
  ranks.Call(1, "x", Allreduce({2}));
  ranks.Speak(1);  // by number; the message is under way while the number is taken away
  ranks.CallOnAll("y", Allreduce({2}));
  ranks.Speak(1);
  const std::string by_number = ranks[1].upward.front();
  CHECK_EQ(DecodeUpward(by_number).known.size(), 1u);
  ranks[1].upward.pop_front();
  ranks.CarryUp(1);
  ranks.Speak(0);
  ranks[1].upward.push_front(by_number);
  ranks.Call(0, "x", Allreduce({2}));
  ranks.Settle();
  CHECK_EQ(ranks[0].agreed, (Keys{"x", "y", "x"}));
  CHECK_EQ(ranks[1].agreed, ranks[0].agreed);
}

TEST("a number that nobody has given is an internal error") {
  Agreement ranks(Topology::OneHost(2), Options{});
  Upward message;
  message.known = {77};
  bool was_refused = false;
  try {
    ranks[0].readiness->AddFromChild(1, message, ranks.now_s);
  } catch (const Error& error) {
    was_refused = error.code() == Code::kInternal;
    CHECK_HAS(error.what(), "rank 1 named a request by an unknown number");
  }
  CHECK(was_refused);
}

TEST("disagreement on shape: name, ranks, both values, what to do") {
  CHECK_EQ(Disagreement({Allreduce({784, 128}), Allreduce({784, 128}), Allreduce({784, 128}),
                         Allreduce({784, 64})},
                        "gradient/0#dense/kernel"),
           "allreduce 'dense/kernel': ranks disagree on shape: ranks 0, 1, 2 have (784, 128), rank "
           "3 has (784, 64). Build the same model and make the same calls on every rank.");
}

TEST("disagreement on anything that must be equal names it, with both values") {
  const Signature x = Allreduce({2});
  CHECK_HAS(Disagreement({x, Allreduce({2}, DType::kFloat16)}),
            "disagree on dtype: rank 0 has float32, rank 1 has float16");
  CHECK_HAS(Disagreement({x, Allreduce({})}), "on shape: rank 0 has (2,), rank 1 has ()");
  Signature other = x;
  other.is_mean = true;
  CHECK_HAS(Disagreement({x, other}), "on operation: rank 0 has sum, rank 1 has mean");
  other = x;
  other.op = ReduceOp::kMax;
  CHECK_HAS(Disagreement({other, x}), "on operation: rank 0 has max, rank 1 has sum");
  other = x;
  other.prescale = 0.5;
  CHECK_HAS(Disagreement({x, other}), "on prescale_factor: rank 0 has 1, rank 1 has 0.5");
  other = x;
  other.postscale = 2;
  CHECK_HAS(Disagreement({x, other}), "on postscale_factor: rank 0 has 1, rank 1 has 2");
  other = x;
  other.dtypes.push_back(DType::kFloat32);
  other.shapes.push_back({2});
  CHECK_HAS(Disagreement({x, other}), "on number of tensors: rank 0 has 1, rank 1 has 2");
  Signature longer = other;
  longer.shapes[1] = {3};
  CHECK_HAS(Disagreement({other, longer}),
            "on shape of tensor 1: rank 0 has (2,), rank 1 has (3,)");
  Signature root = x;
  root.kind = other.kind = Kind::kBroadcast;
  other = root;
  other.root = 1;
  CHECK_HAS(Disagreement({root, other}), "on root rank: rank 0 has 0, rank 1 has 1");
  CHECK_HAS(Disagreement({x, root}), "on collective: rank 0 has allreduce, rank 1 has broadcast");
}

TEST("disagreement of many ranks in three camps shows each camp") {
  std::vector<Signature> of_rank(40, Allreduce({2}));
  of_rank[5] = Allreduce({3});
  of_rank[7] = Allreduce({2}, DType::kInt32);
  const std::string text = Disagreement(of_rank);
  CHECK_HAS(text, "and 22 more have (2,)");
  CHECK_HAS(text, "rank 5 has (3,)");
  CHECK_HAS(text, "rank 7 has dtype int32");
}

TEST("ranks disagree wherever they sit in the tree") {
  for (const Topology& topology : SomeTopologies()) {
    for (int wrong = 0; wrong < topology.size() && topology.size() > 1; ++wrong) {
      const Note note("hosts ", topology.node_of, ", wrong: rank ", wrong);
      Agreement ranks(topology, Options{});
      // The second time the name is known by number.
      ranks.CallOnAll("x", Allreduce({2}));
      ranks.Settle();
      for (int rank = 0; rank < ranks.size(); ++rank) {
        ranks[rank].agreed.clear();
        ranks.Call(rank, "x", Allreduce({rank == wrong ? 9 : 2}));
      }
      ranks.Settle();
      const Status status = OnlyRefusal(&ranks, "x");
      CHECK_HAS(status.message, "rank " + std::to_string(wrong) + " has (9,)");
    }
  }
}

TEST("after a refusal what still waits is agreed on, and the refused name works again") {
  Agreement ranks(HostsOf({0, 0, 1, 1}), Options{});
  for (int rank = 0; rank < 4; ++rank) {
    if (rank != 2) ranks.Call(rank, "early", Allreduce({5}));
  }
  ranks.Settle();
  for (int rank = 0; rank < 4; ++rank) ranks.Call(rank, "bad", Allreduce({rank == 3 ? 1 : 2}));
  ranks.Settle();
  CHECK_EQ(ranks[0].refused.size(), 1u);
  ranks.Call(2, "early", Allreduce({5}));
  ranks.CallOnAll("bad", Allreduce({2}));
  ranks.Settle();
  for (int rank = 0; rank < 4; ++rank) {
    CHECK_EQ(ranks[rank].refused.size(), 1u);
    Keys agreed = ranks[rank].agreed;
    CHECK_EQ(agreed, ranks[0].agreed);
    std::sort(agreed.begin(), agreed.end());
    CHECK_EQ(agreed, (Keys{"bad", "early"}));
  }
}

TEST("what was said before a refusal counts for nothing after it") {
  Agreement ranks(Topology::OneHost(2), Options{});
  ranks.CallOnAll("bad", Allreduce({1}));
  ranks.Settle();
  ranks.Call(0, "bad", Allreduce({1}));
  ranks.Call(1, "bad", Allreduce({2}));
  ranks.Speak(1);
  ranks.CarryUp(1);
  ranks.Call(1, "x", Allreduce({1}));
  ranks.Speak(1);  // of the epoch that is about to end; told anew after it
  ranks.Speak(0);  // refuses "bad"
  ranks.CarryUp(1);
  ranks.CarryDown(1);
  ranks.Call(0, "x", Allreduce({1}));
  ranks.Settle();
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_EQ(ranks[rank].refused.size(), 1u);
    CHECK_EQ(ranks[rank].agreed, (Keys{"bad", "x"}));
  }
}

Options Stalls() {
  Options options;
  options.stall_s = 8;
  options.stall_error_s = 20;
  return options;
}

TEST("a stall is reported once, with the tensor, who called and who is missing") {
  for (const auto& hosts : {Topology::OneHost(6), HostsOf({0, 0, 1, 1, 2, 2})}) {
    const Note note("hosts ", hosts.node_of);
    Agreement ranks(hosts, Stalls());
    for (const int rank : {0, 3, 4}) ranks.Call(rank, "gradient/7#dense/bias", Allreduce({2}));
    for (int s = 0; s < 8; ++s) {
      ranks.Settle();
      CHECK_EQ(ranks[5].reports.size(), 0u);
      ranks.now_s += 1;
    }
    for (int s = 8; s < 12; ++s) {
      ranks.now_s += 1;
      ranks.Settle();
    }
    for (int rank = 0; rank < 6; ++rank) {
      CHECK_EQ(ranks[rank].reports.size(), 1u);
      CHECK_EQ(ranks[rank].refused.size(), 0u);
      CHECK_HAS(ranks[rank].reports[0], "allreduce 'dense/bias' has waited ");
      CHECK_HAS(ranks[rank].reports[0],
                " s; missing ranks: 1, 2, 5; ranks that called it: 0, 3, 4.");
      CHECK_HAS(ranks[rank].reports[0], "KERAS_RING_STALL_S (now 8 s)");
    }
  }
}

TEST("a stall that goes on is an error; the missing ranks may still be late for the next call") {
  Agreement ranks(Topology::OneHost(3), Stalls());
  for (const int rank : {1, 2}) ranks.Call(rank, "x", Allreduce({2}));
  for (int s = 0; s <= 22; ++s) {
    ranks.Settle();
    ranks.now_s += 1;
  }
  const Status status = OnlyRefusal(&ranks, "x");
  CHECK_EQ(status.code, Code::kTimeout);
  CHECK_HAS(status.message, "missing ranks: 0; ranks that called it: 1, 2.");
  CHECK_HAS(status.message, "KERAS_RING_STALL_ERROR_S (now 20 s; 0: never)");
  ranks.CallOnAll("x", Allreduce({2}));
  ranks.Settle();
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks[rank].agreed, Keys{"x"});
}

TEST("without a second limit a stall is no error, and ends when the last rank comes") {
  Options options = Stalls();
  options.stall_error_s = 0;
  Agreement ranks(HostsOf({0, 0, 0, 1, 1}), options);
  for (int rank = 0; rank < 5; ++rank) {
    for (int s = 0; s < 30; ++s) {  // one rank every 30 seconds
      ranks.Settle();
      ranks.now_s += 1;
    }
    CHECK_EQ(ranks[0].agreed, Keys{});
    ranks.Call(rank, "x", Allreduce({2}));
  }
  ranks.Settle();
  for (int rank = 0; rank < 5; ++rank) {
    CHECK_EQ(ranks[rank].agreed, Keys{"x"});
    CHECK_EQ(ranks[rank].refused.size(), 0u);
    CHECK_EQ(ranks[rank].reports.size(), 1u);
  }
}

TEST("ranks that disagree are found when the last of them comes, after reports in part") {
  Agreement ranks(Topology::OneHost(4), Stalls());
  for (int rank = 0; rank < 3; ++rank) {
    ranks.Call(rank, "x", Allreduce({rank == 1 ? 7 : 2}));
    ranks.Settle();
    ranks.now_s += 5;
    ranks.Settle();
  }
  ranks.Call(3, "x", Allreduce({2}));
  ranks.Settle();
  const Status status = OnlyRefusal(&ranks, "x");
  CHECK_HAS(status.message, "ranks 0, 2, 3 have (2,), rank 1 has (7,)");
}

TEST("the label is kept from whoever gives one, also for a request known by number") {
  Agreement ranks(Topology::OneHost(3), Stalls());
  ranks.CallOnAll("gradient/3#conv/kernel", Allreduce({2}));
  ranks.Settle();
  for (const int rank : {1, 2}) ranks.Call(rank, "gradient/3#conv/kernel", Allreduce({2}));
  for (int s = 0; s < 12; ++s) {
    ranks.Settle();
    ranks.now_s += 1;
  }
  CHECK_HAS(ranks[0].reports.at(0), "allreduce 'conv/kernel' has waited");
}

TEST("a departure reaches everybody, once, and nothing is agreed on after it") {
  for (const Topology& topology : SomeTopologies()) {
    for (int leaving = 0; leaving < topology.size(); ++leaving) {
      const Note note("hosts ", topology.node_of, ", leaving: rank ", leaving);
      Agreement ranks(topology, Options{});
      ranks[leaving].readiness->AddDeparture({leaving, "it called shutdown"});
      ranks.Settle();
      ranks.CallOnAll("x", Allreduce({2}));
      ranks.Settle();
      for (int rank = 0; rank < ranks.size(); ++rank) {
        CHECK_EQ(ranks[rank].departures.size(), 1u);
        CHECK_EQ(ranks[rank].departures[0].rank, leaving);
        CHECK_EQ(ranks[rank].departures[0].reason, "it called shutdown");
        CHECK_EQ(ranks[rank].agreed, Keys{});
      }
    }
  }
}

TEST("a departure told before a refusal is not lost with the epoch") {
  Agreement ranks(Topology::OneHost(2), Options{});
  ranks.Call(0, "bad", Allreduce({1}));
  ranks.Call(1, "bad", Allreduce({2}));
  ranks.Speak(1);
  ranks.CarryUp(1);
  ranks[1].readiness->AddDeparture({1, "gone"});
  ranks.Speak(1);
  ranks.Speak(0);
  ranks.Settle();
  CHECK_EQ(ranks[0].refused.size(), 1u);
  CHECK_EQ(ranks[0].departures.size(), 1u);
  CHECK_EQ(ranks[1].departures.size(), 1u);
}

}  // namespace
}  // namespace keras_ring
