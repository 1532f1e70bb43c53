#include "collectives/select.h"

#include <algorithm>
#include <complex>

namespace keras_ring {

Algorithm SelectAllreduce(Algorithm wished, const Topology& topology, std::size_t slot_bytes) {
  constexpr std::size_t kLargestElem = sizeof(std::complex<double>);
  if (wished == Algorithm::kRing || slot_bytes == 0) return Algorithm::kRing;
  if (topology.num_nodes() == 1) return Algorithm::kLocal;
  if (slot_bytes < kLargestElem * topology.size()) return Algorithm::kRing;
  const int local_size = topology.local_size(0);
  for (int node = 0; node < topology.num_nodes(); ++node) {
    const auto ranks = std::count(topology.node_of.begin(), topology.node_of.end(), node);
    if (ranks != local_size) return Algorithm::kRing;
  }
  // With one rank a host the two are the same, and the ring copies less.
  return local_size == 1 ? Algorithm::kRing : Algorithm::kHierarchical;
}

}  // namespace keras_ring
