#include "engine/execute.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "collectives/adasum.h"
#include "collectives/hierarchical.h"
#include "collectives/hierarchical_gather.h"
#include "collectives/local_parts.h"
#include "collectives/pairwise.h"
#include "collectives/reducescatter.h"
#include "collectives/ring.h"
#include "collectives/schedule.h"
#include "collectives/tree.h"

namespace keras_ring {
namespace {

// FNV-1a: the same on every rank and in every run, unlike std::hash.
std::int64_t StableHash(const std::string& text) {
  std::uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return static_cast<std::int64_t>(hash >> 33);
}

Bucket EmptyBucket(const Routes& routes, const Signature& signature) {
  Bucket bucket;
  bucket.dtype = signature.dtypes.front();
  bucket.op = signature.op;
  bucket.before.factor = signature.prescale;
  bucket.after.factor = signature.postscale;
  bucket.after.divisor = signature.is_mean ? routes.world.size() : 1;
  return bucket;
}

std::int64_t RowElems(const Shape& shape) {
  return NumElems(Shape(shape.begin() + 1, shape.end()));
}

std::int64_t RowBytes(const Signature& signature, std::size_t i) {
  return RowElems(signature.shapes[i]) * static_cast<std::int64_t>(DTypeBytes(signature.dtypes[i]));
}

Error OutOfMemory(const Request& request, std::int64_t bytes) {
  return Error(Code::kInternal,
               Describe(request) + ": no memory for " + std::to_string(bytes) + " bytes");
}

// Room for the result of a tensor.
void* Allocate(const Request& request, std::size_t i, std::int64_t rows) {
  void* const output = request.allocate(i, rows);
  const std::int64_t bytes = rows * RowBytes(request.signature, i);
  if (output == nullptr && bytes > 0) {
    throw OutOfMemory(request, bytes);
  }
  return output;
}

void Allreduce(const Routes& routes, const std::vector<Request*>& requests) {
  const Signature& signature = requests.front()->signature;
  if (signature.dtypes.empty()) return;  // a group of no tensors
  Bucket bucket = EmptyBucket(routes, signature);
  for (const Request* request : requests) {
    const std::int64_t first_chunk = StableHash(KeyOf(request->name));
    for (std::size_t i = 0; i < request->inputs.size(); ++i) {
      bucket.tensors.push_back(BucketTensor{request->inputs[i], request->outputs[i],
                                            NumElems(request->signature.shapes[i]),
                                            first_chunk + static_cast<std::int64_t>(i)});
    }
  }
  const std::unique_ptr<Codec> codec = MakeCodec(signature.compression, bucket.dtype);
  bucket.codec = codec.get();
  if (signature.is_adasum) return Adasum(routes.world, bucket);
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
  switch (routes.movement) {
    case Algorithm::kLocal:
      return LocalAllgather(routes.local, input, block_bytes, output);
    case Algorithm::kHierarchical:
      return HierarchicalAllgather(routes.local, routes.between, input, block_bytes, output);
    case Algorithm::kAuto:
    case Algorithm::kRing:
      return RingAllgather(routes.world, input, block_bytes, output);
  }
}

void Allgather(const Routes& routes, Request* request) {
  const int size = routes.world.size();
  const std::size_t num_tensors = request->inputs.size();
  auto& rows = request->all_rows;
  rows.resize(num_tensors * size);
  const std::vector<std::int64_t> equal(size, 8 * static_cast<std::int64_t>(num_tensors));
  Gather(routes, request->rows.data(), equal, rows.data());
  for (std::size_t i = 0; i < num_tensors; ++i) {
    const std::int64_t row_bytes = RowBytes(request->signature, i);
    std::int64_t all_rows = 0;
    std::vector<std::int64_t> block_bytes;
    for (int rank = 0; rank < size; ++rank) {
      const std::int64_t its_rows = rows[rank * num_tensors + i];
      block_bytes.push_back(its_rows * row_bytes);
      all_rows += its_rows;
    }
    Gather(routes, request->inputs[i], block_bytes, Allocate(*request, i, all_rows));
  }
}

// Where tensor `i` of a broadcast goes; on the root its value is there afterwards.
void* OutputOf(Request* request, std::size_t i, bool is_root, std::int64_t bytes) {
  const Shape& shape = request->signature.shapes[i];
  if (request->outputs.empty() && is_root) {
    request->share(i);
    return const_cast<void*>(request->inputs[i]);  // only read: a root sends
  }
  if (request->outputs.empty()) {
    void* const output = request->allocate(i, shape.empty() ? 1 : shape[0]);
    if (output == nullptr && bytes > 0) throw OutOfMemory(*request, bytes);
    return output;
  }
  void* const output = request->outputs[i];
  if (is_root && bytes > 0 && output != request->inputs[i]) {
    std::memcpy(output, request->inputs[i], bytes);
  }
  return output;
}

void SendFromRoot(const Routes& routes, int root, void* data, std::int64_t bytes) {
  switch (routes.movement) {
    case Algorithm::kLocal:
      return LocalBroadcast(routes.local, root, data, bytes);
    case Algorithm::kHierarchical:
      return HierarchicalBroadcast(routes.local, routes.world, root, data, bytes);
    case Algorithm::kAuto:
    case Algorithm::kRing:
      return TreeBroadcast(routes.world, root, data, bytes);
  }
}

void Broadcast(const Routes& routes, Request* request) {
  const int root = routes.world.transport->topology().rank_of(request->signature.root);
  for (std::size_t i = 0; i < request->inputs.size(); ++i) {
    const std::int64_t bytes = NumElems(request->signature.shapes[i]) *
                               static_cast<std::int64_t>(DTypeBytes(request->signature.dtypes[i]));
    void* const output = OutputOf(request, i, routes.world.rank() == root, bytes);
    SendFromRoot(routes, root, output, bytes);
  }
}

// The network may still read and write the counts when it fails, so they are the request's.
void Alltoall(const Routes& routes, Request* request) {
  const int size = routes.world.size();
  const int own = routes.world.rank();
  const bool is_local = routes.is_one_host && HasRoomForParts(*routes.local.arena);
  const auto* const splits = static_cast<const std::int64_t*>(request->inputs[1]);
  const bool is_even = request->signature.shapes[1][0] == 0;
  std::vector<std::int64_t>& sent = request->rows;
  sent.resize(size, 0);
  const std::int64_t even = sent[0] / size;
  for (int rank = 0; rank < size; ++rank) sent[rank] = is_even ? even : splits[rank];
  std::vector<std::int64_t>& counts = request->all_rows;
  std::vector<std::int64_t> received(size);
  std::int64_t largest = 0;
  if (is_local) {
    // All ranks have to know the largest block of any: it says in how many windows they meet.
    counts.resize(size * size);
    const std::vector<std::int64_t> equal(size, 8 * static_cast<std::int64_t>(size));
    LocalAllgather(routes.local, sent.data(), equal, counts.data());
    for (int from = 0; from < size; ++from) {
      received[from] = counts[from * size + own];
      for (int to = 0; to < size; ++to) {
        if (to != from) largest = std::max(largest, counts[from * size + to]);
      }
    }
  } else {
    counts.resize(size);
    const std::vector<std::int64_t> equal(size, 8);
    PairwiseAlltoall(routes.world, {sent.data(), equal, counts.data(), equal});
    received = counts;
  }
  const std::int64_t row_bytes = RowBytes(request->signature, 0);
  const std::int64_t rows = std::accumulate(received.begin(), received.end(), std::int64_t{0});
  Blocks blocks{request->inputs[0], sent, Allocate(*request, 0, rows), received};
  for (std::int64_t& bytes : blocks.send_bytes) bytes *= row_bytes;
  for (std::int64_t& bytes : blocks.recv_bytes) bytes *= row_bytes;
  std::memcpy(Allocate(*request, 1, size), received.data(), 8 * received.size());
  if (is_local) return LocalAlltoall(routes.local, blocks, largest * row_bytes);
  PairwiseAlltoall(routes.world, blocks);
}

void Reducescatter(const Routes& routes, const Request& request) {
  const int size = routes.world.size();
  const int own = routes.world.rank();
  Bucket bucket = EmptyBucket(routes, request.signature);
  for (std::size_t i = 0; i < request.inputs.size(); ++i) {
    const Shape& shape = request.signature.shapes[i];
    void* const output = Allocate(request, i, PartOf(shape[0], size, own).elems());
    AddRows(request.inputs[i], shape[0], RowElems(shape), own, size, output, &bucket);
  }
  if (routes.is_one_host && HasRoomForParts(*routes.local.arena)) {
    return LocalReducescatter(routes.local, bucket);
  }
  RingReducescatter(routes.world, bucket);
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
    case Kind::kAlltoall:
      return Alltoall(routes, bucket.front());
    case Kind::kReducescatter:
      return Reducescatter(routes, *bucket.front());
    case Kind::kJoin:
      // Alone a rank is the last.
      *static_cast<std::int32_t*>(bucket.front()->outputs[0]) =
          std::max(0, bucket.front()->last_joined);
      return;
    case Kind::kBarrier:
      return;  // that all ranks have agreed on it is all there is to it
  }
}

}  // namespace keras_ring
