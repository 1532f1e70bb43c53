#include "engine/execute.h"

#include <cstring>
#include <numeric>

#include "collectives/hierarchical.h"
#include "collectives/ring.h"
#include "collectives/tree.h"

namespace keras_ring {
namespace {

// FNV-1a: the same on every rank and in every run, unlike std::hash.
std::int64_t StableHash(const std::string& text) {
  std::uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return static_cast<std::int64_t>(hash >> 33);
}

void Allreduce(const Routes& routes, const std::vector<Request*>& requests) {
  const Signature& signature = requests.front()->signature;
  if (signature.dtypes.empty()) return;  // a group of no tensors
  Bucket bucket;
  bucket.dtype = signature.dtypes.front();
  bucket.op = signature.op;
  bucket.before.factor = signature.prescale;
  bucket.after.factor = signature.postscale;
  bucket.after.divisor = signature.is_mean ? routes.world.size() : 1;
  for (const Request* request : requests) {
    const std::int64_t first_chunk = StableHash(KeyOf(request->name));
    for (std::size_t i = 0; i < request->inputs.size(); ++i) {
      bucket.tensors.push_back(BucketTensor{request->inputs[i], request->outputs[i],
                                            NumElems(request->signature.shapes[i]),
                                            first_chunk + static_cast<std::int64_t>(i)});
    }
  }
  switch (routes.allreduce) {
    case Algorithm::kLocal:
      return LocalAllreduce(routes.local, bucket);
    case Algorithm::kHierarchical:
      return HierarchicalAllreduce(routes.local, routes.between, bucket);
    case Algorithm::kAuto:
    case Algorithm::kRing:
      return RingAllreduce(routes.world, bucket);
  }
}

void Gather(const Routes& routes, const void* input, const std::vector<std::int64_t>& block_bytes,
            void* output) {
  if (routes.is_one_host) return LocalAllgather(routes.local, input, block_bytes, output);
  RingAllgather(routes.world, input, block_bytes, output);
}

void Allgather(const Routes& routes, Request* request) {
  const int size = routes.world.size();
  const std::size_t num_tensors = request->inputs.size();
  auto& rows = request->all_rows;
  rows.resize(num_tensors * size);
  const std::vector<std::int64_t> equal(size, 8 * static_cast<std::int64_t>(num_tensors));
  Gather(routes, request->rows.data(), equal, rows.data());
  for (std::size_t i = 0; i < num_tensors; ++i) {
    const Shape& shape = request->signature.shapes[i];
    const std::int64_t row_bytes =
        std::accumulate(shape.begin() + 1, shape.end(),
                        static_cast<std::int64_t>(DTypeBytes(request->signature.dtypes[i])),
                        [](std::int64_t a, std::int64_t b) { return a * b; });
    std::int64_t all_rows = 0;
    std::vector<std::int64_t> block_bytes;
    for (int rank = 0; rank < size; ++rank) {
      const std::int64_t its_rows = rows[rank * num_tensors + i];
      block_bytes.push_back(its_rows * row_bytes);
      all_rows += its_rows;
    }
    void* output = request->allocate(i, all_rows);
    if (output == nullptr && all_rows * row_bytes > 0) {
      throw Error(Code::kInternal, "allgather '" + LabelOf(request->name) + "': no memory for " +
                                       std::to_string(all_rows * row_bytes) + " bytes");
    }
    Gather(routes, request->inputs[i], block_bytes, output);
  }
}

void Broadcast(const Routes& routes, Request* request) {
  for (std::size_t i = 0; i < request->inputs.size(); ++i) {
    const std::int64_t bytes = NumElems(request->signature.shapes[i]) *
                               static_cast<std::int64_t>(DTypeBytes(request->signature.dtypes[i]));
    if (routes.world.rank() == request->signature.root && bytes > 0 &&
        request->outputs[i] != request->inputs[i]) {
      std::memcpy(request->outputs[i], request->inputs[i], bytes);
    }
    if (routes.is_one_host) {
      LocalBroadcast(routes.local, request->signature.root, request->outputs[i], bytes);
    } else {
      TreeBroadcast(routes.world, request->signature.root, request->outputs[i], bytes);
    }
  }
}

}  // namespace

void Execute(const Routes& routes, const std::vector<Request*>& bucket) {
  switch (bucket.front()->signature.kind) {
    case Kind::kAllreduce:
      return Allreduce(routes, bucket);
    case Kind::kAllgather:
      return Allgather(routes, bucket.front());
    case Kind::kBroadcast:
      return Broadcast(routes, bucket.front());
    case Kind::kBarrier:
      return;  // that all ranks have agreed on it is all there is to it
  }
}

}  // namespace keras_ring
