#include "engine/messages.h"

#include <functional>

#include "check.h"

namespace keras_ring {
namespace {

using check::Note;

Signature SomeSignature() {
  Signature signature;
  signature.kind = Kind::kAllreduce;
  signature.op = ReduceOp::kMax;
  signature.is_mean = true;
  signature.is_adasum = true;
  signature.compression = Compression::kBf16;
  signature.root = 7;
  signature.prescale = 0.1;
  signature.postscale = -3e300;
  signature.dtypes = {DType::kBfloat16, DType::kComplex128};
  signature.shapes = {{}, {-1, 0, std::int64_t{1} << 40}};
  signature.problem = "splits are wrong";
  return signature;
}

Upward SomeUpward() {
  Upward message;
  message.epoch = 3;
  message.seen = std::uint64_t{1} << 50;
  message.known = {4, 5, 9};
  message.named = {
      {"gradient/0#dense/kernel", 1.5, {{SomeSignature(), {0, 2}}, {Signature{}, {1}}}},
      {"", 0, {}}};
  message.joined = {5, 2};
  message.departures = {{3, "its script raised ValueError: …"}, {4, ""}};
  return message;
}

Publication SomePublication() {
  Publication message;
  message.sequence = 12;
  message.agreed = {{true, 5, "", false, "", {}},
                    {false, 0, "a name", false, "", {}},
                    {true, 0, "", false, "", {}},
                    {false, 0, "b", true, "b#label", SomeSignature()}};
  message.last_joined = 3;
  message.refused = {{"b", {Code::kMismatch, "ranks disagree"}}};
  message.reports = {"one", std::string("with\0zero", 9)};
  message.departures = {{1, "gone"}};
  return message;
}

std::vector<std::string> SomeMessages() {
  return {Encode(SomeUpward()), Encode(Upward{}), Encode(SomePublication()), Encode(Publication{}),
          Encode(Failure{{Code::kPeerLost, "rank 3 is gone"}})};
}

void Decode(const std::string& bytes) {
  switch (TypeOf(bytes)) {
    case MessageType::kUpward:
      DecodeUpward(bytes);
      break;
    case MessageType::kPublication:
      DecodePublication(bytes);
      break;
    case MessageType::kFailure:
      DecodeFailure(bytes);
      break;
  }
}

bool IsRefused(const std::function<void()>& decode) {
  try {
    decode();
    return false;
  } catch (const Error& error) {
    CHECK_EQ(error.code(), Code::kInternal);
    return true;
  }
}

TEST("an upward message arrives as it was sent") {
  const Upward sent = SomeUpward();
  CHECK_EQ(TypeOf(Encode(sent)), MessageType::kUpward);
  const Upward got = DecodeUpward(Encode(sent));
  CHECK_EQ(got.epoch, sent.epoch);
  CHECK_EQ(got.seen, sent.seen);
  CHECK_EQ(got.known, sent.known);
  CHECK_EQ(got.named.size(), 2u);
  CHECK_EQ(got.named[0].name, sent.named[0].name);
  CHECK_EQ(got.named[0].waited_s, 1.5);
  CHECK_EQ(got.named[0].callers.size(), 2u);
  CHECK(got.named[0].callers[0].signature == SomeSignature());
  CHECK(got.named[0].callers[1].signature == Signature{});
  CHECK_EQ(got.named[0].callers[0].ranks, (std::vector<std::int32_t>{0, 2}));
  CHECK_EQ(got.named[1].callers.size(), 0u);
  CHECK_EQ(got.joined, (std::vector<std::int32_t>{5, 2}));
  CHECK_EQ(got.departures.size(), 2u);
  CHECK_EQ(got.departures[0].rank, 3);
  CHECK_EQ(got.departures[0].reason, sent.departures[0].reason);
}

TEST("a publication arrives as it was sent") {
  const Publication sent = SomePublication();
  CHECK_EQ(TypeOf(Encode(sent)), MessageType::kPublication);
  const Publication got = DecodePublication(Encode(sent));
  CHECK_EQ(got.sequence, sent.sequence);
  CHECK_EQ(got.agreed.size(), 4u);
  CHECK_EQ(got.agreed[3].name, "b#label");
  CHECK(got.agreed[3].signature == SomeSignature());
  CHECK_EQ(got.last_joined, 3);
  CHECK(got.agreed[0].is_known);
  CHECK_EQ(got.agreed[0].number, 5u);
  CHECK(!got.agreed[1].is_known);
  CHECK_EQ(got.agreed[1].key, "a name");
  CHECK_EQ(got.refused.at(0).key, "b");
  CHECK_EQ(got.refused.at(0).status.code, Code::kMismatch);
  CHECK_EQ(got.refused.at(0).status.message, "ranks disagree");
  CHECK_EQ(got.reports, sent.reports);
  CHECK_EQ(got.departures.at(0).reason, "gone");
}

TEST("a failure arrives as it was sent") {
  const std::string bytes = Encode(Failure{{Code::kTimeout, "too long"}});
  CHECK_EQ(TypeOf(bytes), MessageType::kFailure);
  CHECK_EQ(DecodeFailure(bytes).status.code, Code::kTimeout);
  CHECK_EQ(DecodeFailure(bytes).status.message, "too long");
}

TEST("numbers: none, one, dense ones and scattered ones arrive in any case") {
  const std::uint32_t most = 0xffffffffu;
  std::vector<std::uint32_t> dense;
  for (std::uint32_t i = 1000; i < 5000; i += i % 3 + 1) dense.push_back(i);
  const std::vector<std::vector<std::uint32_t>> sets = {
      {}, {0}, {most}, {0, most}, {7, 8, 15, 16}, {most - 40, most - 1, most}, dense};
  for (const auto& numbers : sets) {
    const Note note("numbers ", numbers);
    Upward message;
    message.known = numbers;
    CHECK_EQ(DecodeUpward(Encode(message)).known, numbers);
  }
}

TEST("numbers: 200 gradients of a step take a bit each") {
  Upward message;
  const std::size_t empty_bytes = Encode(message).size();
  for (std::uint32_t i = 500; i < 700; ++i) message.known.push_back(i);
  CHECK(Encode(message).size() - empty_bytes <= 200 / 8 + 8);
}

TEST("truncated messages, and longer ones, are refused") {
  for (const std::string& bytes : SomeMessages()) {
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      const Note note("type ", int{bytes[0]}, ", ", length, " of ", bytes.size(), " bytes");
      CHECK(IsRefused([&] { Decode(bytes.substr(0, length)); }));
    }
    CHECK(IsRefused([&] { Decode(bytes + '\0'); }));
  }
}

TEST("a message of one type is not read as one of another") {
  const std::string failure = Encode(Failure{});
  CHECK(IsRefused([&] { DecodeUpward(failure); }));
  CHECK(IsRefused([&] { DecodePublication(failure); }));
  CHECK(IsRefused([&] { DecodeFailure(Encode(Upward{})); }));
}

TEST("a damaged byte gives another message or an error, never a crash") {
  for (const std::string& bytes : SomeMessages()) {
    for (std::size_t at = 1; at < bytes.size(); ++at) {
      for (const int damage : {1, 2, 0x80, 0xff}) {
        std::string damaged = bytes;
        damaged[at] = static_cast<char>(damaged[at] ^ damage);
        IsRefused([&] { Decode(damaged); });
      }
    }
  }
}

}  // namespace
}  // namespace keras_ring
