// What the ranks say to each other to agree: plain structs and their bytes. All ranks run one
// build of keras_ring on machines of one byte order.
#ifndef KERAS_RING_ENGINE_MESSAGES_H_
#define KERAS_RING_ENGINE_MESSAGES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"
#include "engine/request.h"

namespace keras_ring {

// Which ranks have called a collective with which signature.
struct Callers {
  Signature signature;
  std::vector<std::int32_t> ranks;
};

// A name that is not known by number yet, or on which ranks disagree, or that waits for long.
struct NamedReadiness {
  std::string name;  // with the label of the first rank that called
  double waited_s = 0;
  std::vector<Callers> callers;
};

struct Departure {
  std::int32_t rank = 0;
  std::string reason;  // "it called shutdown", "its script raised ValueError: …"
};

// Child to parent: what has become ready below.
struct Upward {
  std::uint32_t epoch = 0;           // counts the disagreements; see Readiness
  std::uint64_t seen = 0;            // last publication that the child has taken in
  std::vector<std::uint32_t> known;  // numbers of requests that are ready on the whole subtree
  std::vector<NamedReadiness> named;
  std::vector<std::int32_t> joined;  // ranks below that have called join, as they came
  std::vector<Departure> departures;
};

// A request that all ranks run now, in the order of the list.
struct Agreed {
  bool is_known = false;
  std::uint32_t number = 0;  // when known
  std::string key;           // when not: gets the next number on every rank
  // When not, and a rank has joined: what that rank has to know, since it does not call.
  bool has_call = false;
  std::string name;
  Signature signature;
};

// A request that fails on every rank.
struct Refused {
  std::string key;
  Status status;
};

// Root to all, down the tree: the next things that happen, the same in the same order everywhere.
struct Publication {
  std::uint64_t sequence = 0;
  std::vector<Agreed> agreed;
  std::vector<Refused> refused;
  std::int32_t last_joined = -1;     // with a join that is agreed on
  std::vector<std::string> reports;  // to be logged on every rank
  std::vector<Departure> departures;
};

// Anybody to everybody: this generation is over.
struct Failure {
  Status status;
};

enum class MessageType : std::uint8_t { kUpward, kPublication, kFailure };

std::string Encode(const Upward& message);
std::string Encode(const Publication& message);
std::string Encode(const Failure& message);

// The first byte. The others throw Error(kInternal) when the bytes are not such a message.
MessageType TypeOf(const std::string& bytes);
Upward DecodeUpward(const std::string& bytes);
Publication DecodePublication(const std::string& bytes);
Failure DecodeFailure(const std::string& bytes);

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_MESSAGES_H_
