#include "ops/node.h"

#include <cstdlib>

namespace keras_ring {
namespace {

void SetOp(const std::string& op, Signature* signature) {
  signature->is_mean = op == "mean";
  signature->is_adasum = op == "adasum";
  for (const ReduceOp candidate :
       {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    if (op == ReduceOpName(candidate)) signature->op = candidate;
  }
}

}  // namespace

Node ReadNode(Kind kind, const std::function<std::string(const char* name)>& attribute) {
  Node node;
  node.name = attribute("tensor_name");
  node.signature.kind = kind;
  if (kind != Kind::kJoin) node.process_set = std::atoi(attribute("process_set").c_str());
  if (kind == Kind::kAllreduce || kind == Kind::kReducescatter) {
    SetOp(attribute("op"), &node.signature);
    node.signature.prescale = std::strtod(attribute("prescale_factor").c_str(), nullptr);
    node.signature.postscale = std::strtod(attribute("postscale_factor").c_str(), nullptr);
  }
  if (kind == Kind::kAllreduce) {
    const std::string compression = attribute("compression");
    for (const Compression one : kAllCompressions) {
      if (compression == CompressionName(one)) node.signature.compression = one;
    }
  }
  if (kind == Kind::kBroadcast) {
    node.signature.root = std::atoi(attribute("root_rank").c_str());
  }
  return node;
}

}  // namespace keras_ring
