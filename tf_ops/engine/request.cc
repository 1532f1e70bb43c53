#include "engine/request.h"

#include <algorithm>
#include <cstdio>

namespace keras_ring {
namespace {

// keras_ring/collectives/naming.py writes it.
constexpr char kBetweenLabels = '\n';

std::string OpText(const Signature& signature) {
  if (signature.is_adasum) return "adasum";
  return signature.is_mean ? "mean" : ReduceOpName(signature.op);
}

std::string NumberText(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

const char* KindName(Kind kind) {
  switch (kind) {
    case Kind::kAllreduce:
      return "allreduce";
    case Kind::kAllgather:
      return "allgather";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kBarrier:
      return "barrier";
    case Kind::kAlltoall:
      return "alltoall";
    case Kind::kReducescatter:
      return "reducescatter";
    case Kind::kJoin:
      return "join";
  }
  return "unknown";
}

bool NeedsRows(Kind kind) { return HasOpenRows(kind) || kind == Kind::kReducescatter; }

bool HasOpenRows(Kind kind) { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }

bool Signature::operator==(const Signature& other) const {
  return kind == other.kind && op == other.op && is_mean == other.is_mean &&
         is_adasum == other.is_adasum && compression == other.compression && root == other.root &&
         prescale == other.prescale && postscale == other.postscale && dtypes == other.dtypes &&
         shapes == other.shapes && problem == other.problem;
}

std::int64_t BytesOf(const Signature& signature) {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < signature.shapes.size(); ++i) {
    bytes += std::max<std::int64_t>(0, NumElems(signature.shapes[i])) *
             static_cast<std::int64_t>(DTypeBytes(signature.dtypes[i]));
  }
  return bytes;
}

std::int64_t OwnBytes(const Request& request) {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < request.signature.shapes.size(); ++i) {
    const Shape& shape = request.signature.shapes[i];
    auto tensor_bytes = static_cast<std::int64_t>(DTypeBytes(request.signature.dtypes[i]));
    for (const std::int64_t dim : shape) tensor_bytes *= dim < 0 ? request.rows[i] : dim;
    bytes += tensor_bytes;
  }
  return bytes;
}

Difference Differ(const Signature& a, const Signature& b, const std::string& name) {
  if (a.kind != b.kind) return {"collective", KindName(a.kind), KindName(b.kind)};
  if (a.dtypes.size() != b.dtypes.size()) {
    return {"number of tensors", std::to_string(a.dtypes.size()), std::to_string(b.dtypes.size())};
  }
  if (a.kind == Kind::kAlltoall && a.shapes.back() != b.shapes.back()) {
    const auto text = [](const Signature& of) {
      return of.shapes.back()[0] == 0 ? "none" : "some";
    };
    return {"splits", text(a), text(b)};
  }
  const auto where = [&](const char* what, std::size_t i) {
    if (a.dtypes.size() == 1 || a.kind == Kind::kAlltoall) return std::string(what);
    const std::string label = LabelOf(name, i);
    return what + (label.empty() ? " of tensor " + std::to_string(i) : " of '" + label + "'");
  };
  for (std::size_t i = 0; i < a.dtypes.size(); ++i) {
    if (a.dtypes[i] != b.dtypes[i]) {
      return {where("dtype", i), DTypeName(a.dtypes[i]), DTypeName(b.dtypes[i])};
    }
    if (a.shapes[i] != b.shapes[i]) {
      return {where("shape", i), ToString(a.shapes[i]), ToString(b.shapes[i])};
    }
  }
  if (OpText(a) != std::string(OpText(b))) return {"operation", OpText(a), OpText(b)};
  if (a.compression != b.compression) {
    return {"compression", CompressionName(a.compression), CompressionName(b.compression)};
  }
  if (a.root != b.root) return {"root rank", std::to_string(a.root), std::to_string(b.root)};
  if (a.prescale != b.prescale) {
    return {"prescale_factor", NumberText(a.prescale), NumberText(b.prescale)};
  }
  return {"postscale_factor", NumberText(a.postscale), NumberText(b.postscale)};
}

std::string Describe(const Request& request) {
  return std::string(KindName(request.signature.kind)) + " '" + LabelOf(request.name) + "'";
}

std::string KeyOf(const std::string& name) { return name.substr(0, name.find('#')); }

std::string LabelOf(const std::string& name) {
  const std::size_t hash = name.find('#');
  const std::string labels = hash == std::string::npos ? name : name.substr(hash + 1);
  const auto others = std::count(labels.begin(), labels.end(), kBetweenLabels);
  if (others == 0) return labels;
  return labels.substr(0, labels.find(kBetweenLabels)) + " and " + std::to_string(others) + " more";
}

std::string LabelOf(const std::string& name, std::size_t tensor) {
  std::size_t begin = name.find('#');
  if (begin == std::string::npos || name.find(kBetweenLabels, begin) == std::string::npos)
    return "";
  for (++begin; tensor > 0; --tensor) {
    begin = name.find(kBetweenLabels, begin);
    if (begin++ == std::string::npos) return "";
  }
  return name.substr(begin, name.find(kBetweenLabels, begin) - begin);
}

}  // namespace keras_ring
