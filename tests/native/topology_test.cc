#include "transport/topology.h"

#include <algorithm>
#include <cmath>

#include "check.h"

namespace keras_ring {
namespace {

using check::Note;

// Hosts as the transport numbers them: by their lowest rank.
Topology HostsOf(const std::vector<int>& node_of) {
  Topology topology;
  topology.node_of = node_of;
  topology.describe.assign(node_of.size(), "a rank");
  return topology;
}

std::vector<Topology> ManyTopologies() {
  std::vector<Topology> topologies = {HostsOf({0, 0, 1, 1, 2, 2}), HostsOf({0, 1, 0, 1, 0, 1}),
                                      HostsOf({0, 1, 1, 1, 1, 0}), HostsOf({0, 1, 2, 3, 4, 5, 6}),
                                      HostsOf({0, 0, 0, 1, 2, 2, 1})};
  for (const int size : {1, 2, 3, 4, 5, 8, 9, 16, 100}) {
    topologies.push_back(Topology::OneHost(size));
  }
  std::vector<int> eight_per_host;
  for (int rank = 0; rank < 1024; ++rank) eight_per_host.push_back(rank / 8);
  topologies.push_back(HostsOf(eight_per_host));
  return topologies;
}

int DepthOf(const std::vector<TreePlace>& places, int rank) {
  int depth = 0;
  for (int at = rank; places[at].parent >= 0; at = places[at].parent) {
    CHECK(++depth <= static_cast<int>(places.size()));
  }
  return depth;
}

TEST("local ranks count up within a host, in the order of the ranks") {
  const Topology topology = HostsOf({0, 1, 0, 1, 1, 2});
  std::vector<int> local_ranks;
  std::vector<int> local_sizes;
  for (int rank = 0; rank < topology.size(); ++rank) {
    local_ranks.push_back(topology.local_rank(rank));
    local_sizes.push_back(topology.local_size(rank));
  }
  CHECK_EQ(local_ranks, (std::vector<int>{0, 0, 1, 1, 2, 0}));
  CHECK_EQ(local_sizes, (std::vector<int>{2, 3, 2, 3, 3, 1}));
  CHECK_EQ(topology.num_nodes(), 3);
}

TEST("one host holds all ranks of a topology made with OneHost") {
  const Topology topology = Topology::OneHost(5);
  CHECK_EQ(topology.size(), 5);
  CHECK_EQ(topology.num_nodes(), 1);
  CHECK_EQ(topology.local_rank(4), 4);
  CHECK_EQ(topology.local_size(0), 5);
  CHECK_EQ(topology.describe.at(3), "rank 3");
}

TEST("the ranks form one tree with rank 0 as its root") {
  for (const Topology& topology : ManyTopologies()) {
    const Note note("hosts ", topology.node_of);
    const auto places = AgreementTree(topology);
    CHECK_EQ(places.size(), topology.node_of.size());
    std::vector<int> reached = {0};
    for (std::size_t i = 0; i < reached.size(); ++i) {
      for (const int child : places[reached[i]].children) {
        CHECK_EQ(places[child].parent, reached[i]);
        reached.push_back(child);
      }
      CHECK(reached.size() <= places.size());
    }
    CHECK_EQ(reached.size(), places.size());
    CHECK_EQ(places[0].parent, -1);
  }
}

TEST("a subtree's size is one more than its children's together") {
  for (const Topology& topology : ManyTopologies()) {
    const Note note("hosts ", topology.node_of);
    const auto places = AgreementTree(topology);
    for (const TreePlace& place : places) {
      int ranks = 1;
      for (const int child : place.children) ranks += places[child].subtree_size;
      CHECK_EQ(place.subtree_size, ranks);
    }
    CHECK_EQ(places[0].subtree_size, topology.size());
  }
}

TEST("only leaders have a parent or a child on another host") {
  for (const Topology& topology : ManyTopologies()) {
    const Note note("hosts ", topology.node_of);
    const auto places = AgreementTree(topology);
    for (int rank = 0; rank < topology.size(); ++rank) {
      const int parent = places[rank].parent;
      if (parent < 0 || topology.node_of[parent] == topology.node_of[rank]) continue;
      CHECK_EQ(topology.local_rank(rank), 0);
      CHECK_EQ(topology.local_rank(parent), 0);
    }
  }
}

TEST("the tree is as deep as a binary tree of hosts on top of one of local ranks") {
  for (const Topology& topology : ManyTopologies()) {
    const Note note("hosts ", topology.node_of);
    const auto places = AgreementTree(topology);
    int most_local = 0;
    for (int rank = 0; rank < topology.size(); ++rank) {
      most_local = std::max(most_local, topology.local_size(rank));
    }
    const double most = std::log2(topology.num_nodes()) + std::log2(most_local);
    for (int rank = 0; rank < topology.size(); ++rank) {
      CHECK(DepthOf(places, rank) <= most);
      CHECK(places[rank].children.size() <= 4);
    }
  }
}

}  // namespace
}  // namespace keras_ring
