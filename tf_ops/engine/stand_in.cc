#include "engine/stand_in.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "reduce/neutral.h"

namespace keras_ring {
namespace {

struct Memory {
  std::vector<std::unique_ptr<char[]>> pieces;

  void* Make(std::int64_t bytes) {
    pieces.emplace_back(new char[bytes]);
    return pieces.back().get();
  }
};

}  // namespace

Request StandIn(const std::string& name, const Signature& signature) {
  const auto memory = std::make_shared<Memory>();
  Request request;
  request.name = name;
  request.signature = signature;
  request.keep_alive = memory;
  request.done = [](const Status&) {};
  const auto row_bytes = [signature](std::size_t i) {
    std::int64_t bytes = static_cast<std::int64_t>(DTypeBytes(signature.dtypes[i]));
    for (std::size_t d = 1; d < signature.shapes[i].size(); ++d) bytes *= signature.shapes[i][d];
    return bytes;
  };
  for (std::size_t i = 0; i < signature.dtypes.size(); ++i) {
    if (HasOpenRows(signature.kind)) {
      request.inputs.push_back(nullptr);
      request.rows.push_back(0);
      continue;
    }
    const std::int64_t elems = NumElems(signature.shapes[i]);
    void* const values =
        memory->Make(elems * static_cast<std::int64_t>(DTypeBytes(signature.dtypes[i])));
    FillNeutral(signature.dtypes[i], signature.op, values, elems);
    request.inputs.push_back(values);
    request.outputs.push_back(values);
  }
  request.allocate = [memory, row_bytes](std::size_t i, std::int64_t rows) {
    return memory->Make(rows * row_bytes(i));
  };
  return request;
}

}  // namespace keras_ring
