#include "transport/topology.h"

#include <algorithm>
#include <cstddef>

namespace keras_ring {

int Topology::num_nodes() const {
  return node_of.empty() ? 0 : *std::max_element(node_of.begin(), node_of.end()) + 1;
}

int Topology::local_rank(int rank) const {
  return static_cast<int>(std::count(node_of.begin(), node_of.begin() + rank, node_of[rank]));
}

int Topology::local_size(int rank) const {
  return static_cast<int>(std::count(node_of.begin(), node_of.end(), node_of[rank]));
}

int Topology::rank_of(int number) const {
  const auto found = std::find(number_of.begin(), number_of.end(), number);
  return found == number_of.end() ? -1 : static_cast<int>(found - number_of.begin());
}

int Topology::num_lanes() const {
  std::vector<int> ranks_of(num_nodes(), 0);
  for (const int node : node_of) ++ranks_of[node];
  return ranks_of.empty() ? 0 : *std::min_element(ranks_of.begin(), ranks_of.end());
}

Topology Topology::OneHost(int size) {
  Topology topology;
  topology.node_of.assign(size, 0);
  for (int rank = 0; rank < size; ++rank) {
    topology.describe.push_back("rank " + std::to_string(rank));
    topology.number_of.push_back(rank);
  }
  return topology;
}

std::vector<TreePlace> AgreementTree(const Topology& topology) {
  const int size = topology.size();
  std::vector<std::vector<int>> hosts(topology.num_nodes());
  for (int rank = 0; rank < size; ++rank) hosts[topology.node_of[rank]].push_back(rank);
  std::vector<TreePlace> places(size);
  const auto link = [&places](int parent, int child) {
    places[child].parent = parent;
    places[parent].children.push_back(child);
  };
  for (std::size_t node = 1; node < hosts.size(); ++node) {
    link(hosts[(node - 1) / 2].front(), hosts[node].front());
  }
  for (const auto& ranks : hosts) {
    for (std::size_t i = 1; i < ranks.size(); ++i) link(ranks[(i - 1) / 2], ranks[i]);
  }
  // A child is always linked after its parent's own link, but may have a lower rank than it; sum
  // up by walking to the root.
  for (int rank = 0; rank < size; ++rank) {
    for (int above = places[rank].parent; above >= 0; above = places[above].parent) {
      ++places[above].subtree_size;
    }
  }
  return places;
}

}  // namespace keras_ring
