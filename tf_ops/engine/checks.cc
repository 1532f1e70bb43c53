#include "engine/checks.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "reduce/blend.h"

namespace keras_ring {
namespace {

Status CheckOperation(const Request& request, DType dtype) {
  const Signature& signature = request.signature;
  if (signature.is_adasum) {
    if (IsBlendable(dtype)) return {};
    return {Code::kInvalid, Describe(request) + ": op='adasum' has no meaning for dtype " +
                                DTypeName(dtype) + "; use a floating dtype, or op='sum'."};
  }
  if (IsReducible(dtype, signature.op)) return {};
  return {Code::kInvalid, Describe(request) + ": op='" +
                              (signature.is_mean ? "mean" : ReduceOpName(signature.op)) +
                              "' has no meaning for dtype " + DTypeName(dtype) +
                              (dtype == DType::kBool ? "; use op='min' (all) or 'max' (any)."
                                                     : "; use op='sum', 'mean' or 'product'.")};
}

std::string SplitsText(const std::int64_t* splits, std::int64_t num_splits) {
  constexpr std::int64_t kMost = 16;
  Shape shown(splits, splits + std::min(num_splits, kMost));
  std::string text = "(";
  for (std::size_t i = 0; i < shown.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shown[i]);
  }
  return text + (num_splits > kMost ? ", ...)" : shown.size() == 1 ? ",)" : ")");
}

std::string ProblemWithSplits(const Request& request, int size) {
  const std::int64_t rows = request.rows[0];
  const std::int64_t num_splits = request.signature.shapes[1][0];
  const auto* const splits = static_cast<const std::int64_t*>(request.inputs[1]);
  if (num_splits == 0) {
    if (rows % size == 0) return "";
    return "tensor has " + std::to_string(rows) + " rows, which " + std::to_string(size) +
           " ranks cannot share equally. Give splits, the number of rows for each rank.";
  }
  if (num_splits != size) {
    return "splits " + SplitsText(splits, num_splits) + " are " + std::to_string(num_splits) +
           " numbers; expected one for each of the " + std::to_string(size) + " ranks.";
  }
  std::int64_t left = rows;
  for (int rank = 0; rank < size; ++rank) {
    if (splits[rank] < 0 || splits[rank] > left) {
      left = -1;
      break;
    }
    left -= splits[rank];
  }
  if (left == 0) return "";
  return "splits " + SplitsText(splits, num_splits) + " are not a way to cut its tensor of " +
         std::to_string(rows) + " rows; expected numbers from 0 on that add up to the rows.";
}

// "a rank from 0 to 3", or of a part of the job "one of the ranks 0, 2".
std::string AnyOf(const std::vector<int>& numbers) {
  if (numbers.back() + 1 == static_cast<int>(numbers.size())) {
    return "a rank from 0 to " + std::to_string(numbers.back());
  }
  std::string text = "one of the ranks ";
  for (const int number : numbers) {
    text += (number == numbers.front() ? "" : ", ") + std::to_string(number);
  }
  return text;
}

}  // namespace

Status CheckCall(const Request& request, const Topology& topology) {
  const Signature& signature = request.signature;
  if (signature.kind == Kind::kBroadcast && topology.rank_of(signature.root) < 0) {
    return {Code::kInvalid, Describe(request) + ": root_rank is " + std::to_string(signature.root) +
                                "; expected " + AnyOf(topology.number_of) + "."};
  }
  for (std::size_t i = 0; i < signature.dtypes.size(); ++i) {
    if (signature.kind == Kind::kAllreduce || signature.kind == Kind::kReducescatter) {
      const Status status = CheckOperation(request, signature.dtypes[i]);
      if (!status.ok()) return status;
    }
    if (NeedsRows(signature.kind) && signature.shapes[i].empty()) {
      return {Code::kInvalid, Describe(request) +
                                  " takes tensors with at least one dimension, but tensor " +
                                  std::to_string(i) + " is a scalar; reshape it to (1,)."};
    }
  }
  return {};
}

Status CheckSplits(Request* request, int size) {
  if (request->signature.kind != Kind::kAlltoall) return {};
  request->signature.problem = ProblemWithSplits(*request, size);
  if (size > 1 || request->signature.problem.empty()) return {};
  return {Code::kInvalid, Describe(*request) + ": the " + request->signature.problem};
}

}  // namespace keras_ring
