#include "collectives/select.h"

#include <complex>

namespace keras_ring {

Algorithm SelectAllreduce(Algorithm wished, const Topology& topology, std::size_t slot_bytes) {
  constexpr std::size_t kLargestElem = sizeof(std::complex<double>);
  if (wished == Algorithm::kRing || slot_bytes == 0) return Algorithm::kRing;
  if (topology.num_nodes() == 1) return Algorithm::kLocal;
  const auto num_chunks = static_cast<std::size_t>(topology.num_lanes() * topology.num_nodes());
  if (slot_bytes < kLargestElem * num_chunks) return Algorithm::kRing;
  // With one rank a host the two are the same, and the ring copies less.
  return topology.size() == topology.num_nodes() ? Algorithm::kRing : Algorithm::kHierarchical;
}

Algorithm SelectMovement(const Topology& topology, std::size_t slot_bytes) {
  if (slot_bytes == 0) return Algorithm::kRing;
  if (topology.num_nodes() == 1) return Algorithm::kLocal;
  return topology.size() == topology.num_nodes() ? Algorithm::kRing : Algorithm::kHierarchical;
}

bool TravelsWhole(std::int64_t bytes, int num_hosts) {
  // A step takes 30 us or more, in which 32 KiB and more pass a wire of 10 Gbit/s.
  constexpr std::int64_t kBytesOfAStep = 32 * 1024;
  return bytes * (num_hosts - 1) <= 2 * kBytesOfAStep;
}

}  // namespace keras_ring
