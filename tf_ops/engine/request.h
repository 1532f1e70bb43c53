// One call of a collective on this rank, and what the ranks compare about it.
#ifndef KERAS_RING_ENGINE_REQUEST_H_
#define KERAS_RING_ENGINE_REQUEST_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "compression/codec.h"
#include "core/dtype.h"
#include "core/shape.h"
#include "core/status.h"
#include "reduce/reduce.h"

namespace keras_ring {

enum class Kind : std::uint8_t {
  kAllreduce,
  kAllgather,
  kBroadcast,
  kBarrier,
  kAlltoall,
  kReducescatter,
  kJoin
};

const char* KindName(Kind kind);

// Whether tensors need a first dimension, by which they are put together or cut.
bool NeedsRows(Kind kind);
// Whether the ranks may bring tensors of different first dimensions.
bool HasOpenRows(Kind kind);

// Everything that must be the same on all ranks.
struct Signature {
  Kind kind = Kind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  bool is_mean = false;
  bool is_adasum = false;
  Compression compression = Compression::kNone;
  std::int32_t root = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<DType> dtypes;  // of each tensor
  std::vector<Shape> shapes;  // of each tensor; -1 where ranks may differ
  // What is wrong with this rank's call alone, as a sentence that goes on after "its ". It fails
  // the request on every rank, so that none waits for this one.
  std::string problem;

  bool operator==(const Signature& other) const;
};

// Bytes of all tensors; those whose rows are open count as none.
std::int64_t BytesOf(const Signature& signature);

// Says in which respect two signatures differ, and each one's value: {"shape", "(2,)", "(3,)"}. The
// labels in `name` tell the tensors of a group apart.
struct Difference {
  std::string what;
  std::string first;
  std::string second;
};
Difference Differ(const Signature& a, const Signature& b, const std::string& name = "");

// The tensors of an alltoall are the data and this rank's splits, int64: none, or one for each
// rank.
//
// The tensors live until `done` has been called. When the generation fails while the network may
// still write to them, the engine holds on to the request, and so to `keep_alive`.
struct Request {
  // Matched between ranks up to the first '#'; the rest is for messages: a label, or one for each
  // tensor with line ends between.
  std::string name;
  Signature signature;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  // Where kinds need rows: makes room for that many rows of tensor `index` (of a scalar: for it);
  // null on failure. A broadcast may have no outputs and make them so, too; then `share` makes an
  // input the output on the root.
  std::function<void*(std::size_t index, std::int64_t rows)> allocate;
  std::function<void(std::size_t index)> share;
  // Called exactly once, from the engine's thread or from Submit.
  std::function<void(const Status&)> done;
  std::shared_ptr<void> keep_alive;
  // The run of a graph that this request belongs to; 0: none. When one request of a run fails the
  // others of the same run are given up, for their graph will not go on.
  std::int64_t run = 0;
  // Where they are open (see HasOpenRows): this rank's first dimensions. Allgather: then
  // everybody's, rank by rank. Alltoall: then what goes to and comes from each rank.
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> all_rows;
  // Join only: who joined last.
  std::int32_t last_joined = -1;
  // When it was submitted, by the engine's clock.
  double since_s = 0;
};

// Bytes of this rank's tensors.
std::int64_t OwnBytes(const Request& request);

// "allreduce 'dense/kernel'", as messages begin.
std::string Describe(const Request& request);

// The part of a name that ranks match by, and the part that a person wants to read.
std::string KeyOf(const std::string& name);
std::string LabelOf(const std::string& name);

// The label of one tensor of a group; empty when the group has but one label.
std::string LabelOf(const std::string& name, std::size_t tensor);

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_REQUEST_H_
