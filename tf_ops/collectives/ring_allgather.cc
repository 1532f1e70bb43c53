#include <cstring>

#include "collectives/exchange.h"
#include "collectives/gather_plan.h"
#include "collectives/ring.h"

namespace keras_ring {

void RingAllgather(const Wire& wire, const void* input,
                   const std::vector<std::int64_t>& block_bytes, void* output) {
  char* at = static_cast<char*>(output);
  std::vector<Pieces> blocks;
  for (const std::int64_t bytes : block_bytes) {
    blocks.push_back({{at, static_cast<std::size_t>(bytes)}});
    at += bytes;
  }
  const MutableBytes own = blocks[wire.rank()].front();
  if (own.bytes > 0 && own.data != input) std::memcpy(own.data, input, own.bytes);
  RingAllgatherPlan plan(wire.rank(), blocks, wire.segment_bytes);
  RunExchanges(wire, &plan);
}

}  // namespace keras_ring
