#include "collectives/select.h"

#include "check.h"

namespace keras_ring {
namespace {

Topology HostsOf(const std::vector<int>& node_of) {
  Topology topology = Topology::OneHost(static_cast<int>(node_of.size()));
  topology.node_of = node_of;
  return topology;
}

TEST("one host: shared memory, or a ring where there is none or on request") {
  const Topology ranks = Topology::OneHost(4);
  CHECK_EQ(SelectAllreduce(Algorithm::kAuto, ranks, true), Algorithm::kLocal);
  CHECK_EQ(SelectAllreduce(Algorithm::kHierarchical, ranks, true), Algorithm::kLocal);
  CHECK_EQ(SelectAllreduce(Algorithm::kAuto, ranks, false), Algorithm::kRing);
  CHECK_EQ(SelectAllreduce(Algorithm::kLocal, ranks, false), Algorithm::kRing);
  CHECK_EQ(SelectAllreduce(Algorithm::kRing, ranks, true), Algorithm::kRing);
}

TEST("hosts with as many ranks each: hierarchical") {
  for (const auto& hosts : {HostsOf({0, 0, 1, 1}), HostsOf({0, 1, 1, 0, 2, 2})}) {
    CHECK_EQ(SelectAllreduce(Algorithm::kAuto, hosts, true), Algorithm::kHierarchical);
    CHECK_EQ(SelectAllreduce(Algorithm::kLocal, hosts, true), Algorithm::kHierarchical);
    CHECK_EQ(SelectAllreduce(Algorithm::kRing, hosts, true), Algorithm::kRing);
  }
}

TEST("unequal hosts, and hosts of one rank: a ring") {
  for (const auto& hosts : {HostsOf({0, 0, 1}), HostsOf({0, 1, 1}), HostsOf({0, 1, 2})}) {
    CHECK_EQ(SelectAllreduce(Algorithm::kAuto, hosts, true), Algorithm::kRing);
    CHECK_EQ(SelectAllreduce(Algorithm::kHierarchical, hosts, true), Algorithm::kRing);
  }
}

}  // namespace
}  // namespace keras_ring
