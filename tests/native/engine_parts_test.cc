// Alltoall, reducescatter and adasum through the engine: within a host, between hosts and alone.
#include <map>

#include "check.h"
#include "collectives/schedule.h"
#include "engine/engine.h"
#include "engines.h"

namespace keras_ring {
namespace {

using check::Note;
using Values = std::vector<std::int64_t>;

// A request with results of any number of rows, and with splits if it is an alltoall.
struct PartCall {
  std::map<std::size_t, Values> results;
  std::vector<Values> inputs;
  CallPointer call = std::make_shared<Call>();
};

std::shared_ptr<PartCall> SubmitParts(Engine* engine, const std::string& name, Kind kind,
                                      const std::vector<Values>& inputs) {
  const auto parts = std::make_shared<PartCall>();
  parts->inputs = inputs;
  Request request;
  request.name = name;
  request.signature.kind = kind;
  for (const Values& input : parts->inputs) {
    request.inputs.push_back(input.data());
    request.signature.dtypes.push_back(DType::kInt64);
    request.signature.shapes.push_back({static_cast<std::int64_t>(input.size())});
  }
  if (kind == Kind::kAlltoall) {
    request.rows = {static_cast<std::int64_t>(inputs[0].size())};
    request.signature.shapes[0][0] = -1;
  }
  request.allocate = [parts](std::size_t i, std::int64_t rows) -> void* {
    parts->results[i].assign(rows, -1);
    return parts->results[i].data();
  };
  request.done = [parts](const Status& status) { parts->call->promise.set_value(status); };
  request.keep_alive = parts;
  engine->Submit(std::move(request));
  return parts;
}

std::vector<World> SomeWorlds() {
  World apart = Ranks(3);
  apart.slot_bytes = 0;
  World tight = Ranks(5);
  tight.slot_bytes = 64;  // no room for a part of every rank
  return {Ranks(1), Ranks(2), Ranks(3), Ranks(4), apart, tight, Hosts({0, 0, 1, 1})};
}

TEST("alltoall: what a rank has for another one arrives, with how much it is") {
  for (const World& world : SomeWorlds()) {
    Engines engines(world);
    const int size = engines.size();
    const Note note("hosts ", world.topology.node_of, ", slots of ", world.slot_bytes);
    const auto rows = [&](int from, int to) { return (3 * from + 5 * to) % 4; };
    std::vector<std::shared_ptr<PartCall>> calls;
    for (int rank = 0; rank < size; ++rank) {
      Values values;
      Values splits;
      for (int to = 0; to < size; ++to) {
        splits.push_back(rows(rank, to));
        for (int j = 0; j < rows(rank, to); ++j) values.push_back(100 * rank + 10 * to + j);
      }
      calls.push_back(SubmitParts(engines[rank], "x", Kind::kAlltoall, {values, splits}));
    }
    for (int rank = 0; rank < size; ++rank) {
      CHECK_EQ(calls[rank]->call->status().message, std::string());
      Values wanted;
      Values received;
      for (int from = 0; from < size; ++from) {
        received.push_back(rows(from, rank));
        for (int j = 0; j < rows(from, rank); ++j) wanted.push_back(100 * from + 10 * rank + j);
      }
      CHECK_EQ(calls[rank]->results[0], wanted);
      CHECK_EQ(calls[rank]->results[1], received);
    }
    engines.CheckWorks({"next"});
  }
}

TEST("alltoall without splits: the same number for each rank, but not from each") {
  for (const World& world : SomeWorlds()) {
    Engines engines(world);
    const int size = engines.size();
    std::vector<std::shared_ptr<PartCall>> calls;
    for (int rank = 0; rank < size; ++rank) {
      calls.push_back(
          SubmitParts(engines[rank], "x", Kind::kAlltoall, {Values(rank * size, rank), Values()}));
    }
    for (int rank = 0; rank < size; ++rank) {
      CHECK_EQ(calls[rank]->call->status().message, std::string());
      Values wanted;
      for (int from = 0; from < size; ++from) wanted.insert(wanted.end(), from, from);
      CHECK_EQ(calls[rank]->results[0], wanted);
    }
  }
}

TEST("reducescatter: each rank gets its rows, one more on the first when they do not divide") {
  for (const World& world : SomeWorlds()) {
    Engines engines(world);
    const int size = engines.size();
    const Note note("hosts ", world.topology.node_of, ", slots of ", world.slot_bytes);
    const std::int64_t rows = 2 * size + size - 1;
    std::vector<std::shared_ptr<PartCall>> calls;
    for (int rank = 0; rank < size; ++rank) {
      Values values;
      for (std::int64_t j = 0; j < rows; ++j) values.push_back(Value(rank, size, j));
      calls.push_back(SubmitParts(engines[rank], "x", Kind::kReducescatter, {values, {rank}}));
    }
    std::int64_t j = 0;
    for (int rank = 0; rank < size; ++rank) {
      CHECK_EQ(calls[rank]->call->status().message, std::string());
      const Range part = PartOf(rows, size, rank);
      CHECK_EQ(static_cast<std::int64_t>(calls[rank]->results[0].size()), part.elems());
      for (const std::int64_t got : calls[rank]->results[0]) {
        CHECK_EQ(got, j * size * size + size * (size - 1) / 2);
        ++j;
      }
      CHECK_EQ(calls[rank]->results[1], rank == 0 ? Values{size * (size - 1) / 2} : Values{});
    }
    CHECK_EQ(j, rows);
  }
}

std::string Refusal(int size, const Values& values, const Values& splits_of_last,
                    const Values& splits) {
  Engines engines(Ranks(size));
  std::vector<std::shared_ptr<PartCall>> calls;
  for (int rank = 0; rank < size; ++rank) {
    const auto& own = rank == size - 1 ? splits_of_last : splits;
    calls.push_back(SubmitParts(engines[rank], "x#tokens", Kind::kAlltoall, {values, own}));
  }
  for (int rank = 0; rank < size; ++rank) {
    CHECK_EQ(calls[rank]->call->status().code, calls[0]->call->status().code);
    CHECK_EQ(calls[rank]->call->status().message, calls[0]->call->status().message);
  }
  engines.CheckWorks({"next"});
  return calls[0]->call->status().message;
}

TEST("splits that do not fit on one rank are an error on all, and the next request works") {
  const std::string wrong = "alltoall 'tokens': rank 1 has called it wrongly: its ";
  const std::string cut =
      " are not a way to cut its tensor of 4 rows; expected numbers from 0 on "
      "that add up to the rows.";
  const Values values = {1, 2, 3, 4};
  CHECK_EQ(Refusal(2, values, {2, 3}, {2, 2}), wrong + "splits (2, 3)" + cut);
  CHECK_EQ(Refusal(2, values, {2, 1}, {2, 2}), wrong + "splits (2, 1)" + cut);
  CHECK_EQ(Refusal(2, values, {5, -1}, {2, 2}), wrong + "splits (5, -1)" + cut);
  CHECK_EQ(Refusal(2, values, {std::int64_t{1} << 62, std::int64_t{1} << 62}, {2, 2}),
           wrong + "splits (4611686018427387904, 4611686018427387904)" + cut);
  CHECK_EQ(
      Refusal(2, values, {4}, {2, 2}).substr(0, 120),
      (wrong + "splits (4,) are 1 numbers; expected one for each of the 2 ranks.").substr(0, 120));
  CHECK_EQ(
      Refusal(2, values, {}, {2, 2}),
      "alltoall 'tokens': ranks disagree on splits: rank 0 has some, rank 1 has none. Build the "
      "same model and make the same calls on every rank.");
  CHECK_EQ(
      Refusal(3, values, {}, {}),
      "alltoall 'tokens': ranks 0, 1, 2 have called it wrongly: its tensor has 4 rows, which 3 "
      "ranks cannot share equally. Give splits, the number of rows for each rank.");
  CHECK_EQ(Refusal(1, values, {3}, {}), "alltoall 'tokens': the splits (3,)" + cut);
}

}  // namespace
}  // namespace keras_ring
