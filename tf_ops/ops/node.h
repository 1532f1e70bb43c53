// What the attributes of a call say: the part of a request that is the same in every run. Kernels
// read them from a node of a graph, XLA's handlers from a custom call; both have the same.
#ifndef KERAS_RING_OPS_NODE_H_
#define KERAS_RING_OPS_NODE_H_

#include <functional>
#include <string>

#include "engine/request.h"
#include "ops/process.h"

namespace keras_ring {

struct Node {
  int process_set = kWorld;
  std::string name;
  Signature signature;
};

// `attribute` returns the value of a string attribute, or throws.
Node ReadNode(Kind kind, const std::function<std::string(const char* name)>& attribute);

}  // namespace keras_ring

#endif  // KERAS_RING_OPS_NODE_H_
