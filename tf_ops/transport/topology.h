// Who sits where: made once per generation by the transport, read by everybody else.
#ifndef KERAS_RING_TRANSPORT_TOPOLOGY_H_
#define KERAS_RING_TRANSPORT_TOPOLOGY_H_

#include <string>
#include <vector>

namespace keras_ring {

struct Topology {
  // node_of[rank] is the index of the rank's host. Hosts are numbered by their lowest rank, so rank
  // 0 is always on host 0 and the first rank of each host is its leader.
  std::vector<int> node_of;
  // describe[rank] names the process in messages: "rank 3 (host b, pid 812)".
  std::vector<std::string> describe;
  // number_of[rank] is what users call it: its rank in the job, of which this may be a part.
  std::vector<int> number_of;

  int size() const { return static_cast<int>(node_of.size()); }
  int num_nodes() const;
  int local_rank(int rank) const;
  int local_size(int rank) const;
  // The rank with this number, or -1.
  int rank_of(int number) const;
  // Rings that may run between the hosts beside each other: the ranks of the smallest host.
  int num_lanes() const;

  static Topology OneHost(int size);
};

// A rank's place in the tree over which the ranks agree: a binary tree of the hosts' leaders, and
// below each leader a binary tree of its host's other ranks. Depth O(log N). Rank 0 is the root.
struct TreePlace {
  int parent = -1;
  std::vector<int> children;
  int subtree_size = 1;
};

// Pure: the places of all ranks.
std::vector<TreePlace> AgreementTree(const Topology& topology);

}  // namespace keras_ring

#endif  // KERAS_RING_TRANSPORT_TOPOLOGY_H_
