#include "collectives/select.h"

#include "check.h"

namespace keras_ring {
namespace {

constexpr std::size_t kSlotBytes = 4096;

Topology HostsOf(const std::vector<int>& node_of) {
  Topology topology = Topology::OneHost(static_cast<int>(node_of.size()));
  topology.node_of = node_of;
  return topology;
}

TEST("one host: shared memory, or a ring where there is none or on request") {
  const Topology ranks = Topology::OneHost(4);
  CHECK_EQ(SelectAllreduce(Algorithm::kAuto, ranks, kSlotBytes), Algorithm::kLocal);
  CHECK_EQ(SelectAllreduce(Algorithm::kHierarchical, ranks, kSlotBytes), Algorithm::kLocal);
  CHECK_EQ(SelectAllreduce(Algorithm::kAuto, ranks, 0), Algorithm::kRing);
  CHECK_EQ(SelectAllreduce(Algorithm::kLocal, ranks, 0), Algorithm::kRing);
  CHECK_EQ(SelectAllreduce(Algorithm::kRing, ranks, kSlotBytes), Algorithm::kRing);
}

TEST("hosts with as many ranks each: hierarchical") {
  for (const auto& hosts : {HostsOf({0, 0, 1, 1}), HostsOf({0, 1, 1, 0, 2, 2})}) {
    CHECK_EQ(SelectAllreduce(Algorithm::kAuto, hosts, kSlotBytes), Algorithm::kHierarchical);
    CHECK_EQ(SelectAllreduce(Algorithm::kLocal, hosts, kSlotBytes), Algorithm::kHierarchical);
    CHECK_EQ(SelectAllreduce(Algorithm::kRing, hosts, kSlotBytes), Algorithm::kRing);
  }
}

TEST("hosts with different numbers of ranks: hierarchical as well") {
  for (const auto& hosts :
       {HostsOf({0, 0, 1}), HostsOf({0, 1, 1, 1}), HostsOf({0, 0, 1, 2, 2, 2})}) {
    CHECK_EQ(SelectAllreduce(Algorithm::kAuto, hosts, kSlotBytes), Algorithm::kHierarchical);
    CHECK_EQ(SelectAllreduce(Algorithm::kRing, hosts, kSlotBytes), Algorithm::kRing);
  }
}

TEST("hosts of one rank: a ring") {
  const Topology hosts = HostsOf({0, 1, 2});
  CHECK_EQ(SelectAllreduce(Algorithm::kAuto, hosts, kSlotBytes), Algorithm::kRing);
  CHECK_EQ(SelectAllreduce(Algorithm::kHierarchical, hosts, kSlotBytes), Algorithm::kRing);
}

TEST("slots without room for an element of every chunk: a ring") {
  const Topology hosts = HostsOf({0, 0, 1, 1});
  CHECK_EQ(SelectAllreduce(Algorithm::kAuto, hosts, 64), Algorithm::kHierarchical);
  CHECK_EQ(SelectAllreduce(Algorithm::kAuto, hosts, 63), Algorithm::kRing);
  const Topology one_lane = HostsOf({0, 0, 0, 1});
  CHECK_EQ(SelectAllreduce(Algorithm::kAuto, one_lane, 32), Algorithm::kHierarchical);
  CHECK_EQ(SelectAllreduce(Algorithm::kAuto, one_lane, 31), Algorithm::kRing);
}

TEST("what is only moved: shared memory on one host and within several, else a ring") {
  CHECK_EQ(SelectMovement(Topology::OneHost(4), kSlotBytes), Algorithm::kLocal);
  CHECK_EQ(SelectMovement(Topology::OneHost(4), 0), Algorithm::kRing);
  CHECK_EQ(SelectMovement(HostsOf({0, 0, 1}), kSlotBytes), Algorithm::kHierarchical);
  CHECK_EQ(SelectMovement(HostsOf({0, 0, 1}), 0), Algorithm::kRing);
  CHECK_EQ(SelectMovement(HostsOf({0, 1, 2}), kSlotBytes), Algorithm::kRing);
}

TEST("between hosts little data travels whole, the less the more hosts there are") {
  CHECK(TravelsWhole(4, 2));
  CHECK(TravelsWhole(32 * 1024, 3));
  CHECK(TravelsWhole(1024, 64));
  CHECK(!TravelsWhole(33 * 1024, 3));
  CHECK(!TravelsWhole(32 * 1024, 4));
  CHECK(!TravelsWhole(std::int64_t{1} << 40, 2));
}

}  // namespace
}  // namespace keras_ring
