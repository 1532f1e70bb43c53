// Broadcast and allgather over hosts of all shapes, and what they send over the network.
#include "collectives/hierarchical_gather.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "check.h"
#include "ranks.h"

namespace keras_ring {
namespace {

using check::Note;
using Sizes = std::vector<std::int64_t>;

const std::vector<std::vector<int>> kWorlds = {
    {0, 1, 1, 1},       {0, 0, 1},          {0, 0, 1, 2, 2, 2},       {0, 1, 1, 0, 0},
    {0, 1, 2, 2, 1, 0}, {0, 1, 2, 3, 1, 3}, {0, 0, 1, 1, 2, 2, 3, 3}, {0, 0, 0, 1, 2}};

std::vector<char> Block(int rank, std::int64_t bytes) {
  std::vector<char> block(bytes);
  for (std::int64_t j = 0; j < bytes; ++j) block[j] = static_cast<char>(j * 7 + rank * 31 + j / 64);
  return block;
}

// Counts what comes to this rank from other hosts.
class CountingTransport : public Transport {
 public:
  CountingTransport(Transport* inner, std::atomic<std::int64_t>* received_bytes)
      : inner_(*inner), received_bytes_(received_bytes) {}

  int rank() const override { return inner_.rank(); }
  const Topology& topology() const override { return inner_.topology(); }
  Transfer Send(int peer, const void* data, std::size_t bytes) override {
    return inner_.Send(peer, data, bytes);
  }
  Transfer Recv(int peer, void* data, std::size_t bytes) override {
    *received_bytes_ += static_cast<std::int64_t>(bytes);
    if (topology().node_of[peer] == topology().node_of[rank()]) num_near_ += 1;
    return inner_.Recv(peer, data, bytes);
  }
  bool Test(Transfer transfer) override { return inner_.Test(transfer); }
  void SendControl(int peer, std::string message) override {
    inner_.SendControl(peer, std::move(message));
  }
  bool RecvControl(int* peer, std::string* message) override {
    return inner_.RecvControl(peer, message);
  }
  bool HasUnsentControl() override { return inner_.HasUnsentControl(); }
  int FindLostPeer() override { return inner_.FindLostPeer(); }
  Bell* bell() override { return inner_.bell(); }
  bool MustPoll() const override { return inner_.MustPoll(); }
  Arena* arena() override { return inner_.arena(); }
  void Close() override { inner_.Close(); }

  int num_near() const { return num_near_; }

 private:
  Transport& inner_;
  std::atomic<std::int64_t>* const received_bytes_;
  int num_near_ = 0;  // messages between ranks of one host
};

void CheckBroadcast(const World& world, int root, std::int64_t bytes) {
  std::atomic<std::int64_t> received_bytes{0};
  RunRanks(world, [&](const Routes& routes) {
    const Note note("root ", root, ", ", bytes, " bytes, rank ", routes.world.rank());
    CountingTransport transport(routes.world.transport, &received_bytes);
    Wire wire = routes.world;
    wire.transport = &transport;
    std::vector<char> data = Block(wire.rank(), bytes);
    HierarchicalBroadcast(routes.local, wire, root, data.data(), bytes);
    CHECK(data == Block(root, bytes));
    CHECK_EQ(transport.num_near(), 0);
  });
  const Note note("root ", root, ", ", bytes, " bytes");
  CHECK_EQ(received_bytes.load(), (world.topology.num_nodes() - 1) * bytes);
}

TEST("broadcast: from every root, and every host receives each byte once") {
  for (const auto& hosts : kWorlds) {
    const Note note("hosts ", hosts);
    for (int root = 0; root < static_cast<int>(hosts.size()); ++root) {
      for (const std::int64_t bytes : {0, 1, 128, 129, 2011}) {
        CheckBroadcast(Hosts(hosts, bytes == 2011 ? Sends::kLate : Sends::kAtOnce), root, bytes);
      }
    }
  }
}

void CheckAllgather(const World& world, const Sizes& block_bytes, bool in_place) {
  const Topology& topology = world.topology;
  std::vector<char> wanted;
  Sizes host_bytes(topology.num_nodes(), 0);
  for (int rank = 0; rank < topology.size(); ++rank) {
    const std::vector<char> block = Block(rank, block_bytes[rank]);
    wanted.insert(wanted.end(), block.begin(), block.end());
    host_bytes[topology.node_of[rank]] += block_bytes[rank];
  }
  std::atomic<std::int64_t> received_bytes{0};
  RunRanks(world, [&](const Routes& routes) {
    const int rank = routes.world.rank();
    const Note note("blocks ", block_bytes, ", rank ", rank, in_place ? ", in place" : "");
    CountingTransport transport(routes.world.transport, &received_bytes);
    Between between = routes.between;
    between.across.transport = &transport;
    const std::vector<char> input = Block(rank, block_bytes[rank]);
    std::vector<char> output(wanted.size(), 0);
    char* const own = output.data() + std::accumulate(block_bytes.begin(),
                                                      block_bytes.begin() + rank, std::int64_t{0});
    if (in_place) std::copy(input.begin(), input.end(), own);
    HierarchicalAllgather(routes.local, between, in_place ? own : input.data(), block_bytes,
                          output.data());
    CHECK(output == wanted);
    CHECK_EQ(transport.num_near(), 0);
  });
  std::int64_t from_others = 0;
  for (const std::int64_t bytes : host_bytes) {
    from_others += static_cast<std::int64_t>(wanted.size()) - bytes;
  }
  const Note note("blocks ", block_bytes);
  CHECK_EQ(received_bytes.load(), from_others);
}

TEST("allgather: blocks of all sizes, and every host receives each of the others' once") {
  std::minstd_rand random(3);
  for (const auto& hosts : kWorlds) {
    const Note note("hosts ", hosts);
    const auto size = static_cast<int>(hosts.size());
    for (int round = 0; round < 20; ++round) {
      Sizes block_bytes(size, round == 0 ? 0 : 65);
      for (std::int64_t& bytes : block_bytes) {
        if (round > 1) bytes = random() % 3 == 0 ? 0 : random() % (round % 2 == 0 ? 80 : 1500);
      }
      CheckAllgather(Hosts(hosts, round % 3 == 0 ? Sends::kLate : Sends::kAtOnce), block_bytes,
                     /*in_place=*/round % 2 == 0);
    }
  }
}

TEST("collectives of all kinds follow each other without taking each other's slots or messages") {
  for (const auto& hosts : kWorlds) {
    const Note note("hosts ", hosts);
    RunRanks(Hosts(hosts, Sends::kLate), [&](const Routes& routes) {
      const int size = routes.world.size();
      const int rank = routes.world.rank();
      for (std::int64_t i = 0; i < 40; ++i) {
        const std::int64_t elems = 1 + i * 7;
        std::vector<std::int64_t> values(elems, rank + i);
        Bucket bucket;
        bucket.dtype = DType::kInt64;
        bucket.tensors = {{values.data(), values.data(), elems, i}};
        HierarchicalAllreduce(routes.local, routes.between, bucket);
        CHECK_EQ(values, std::vector<std::int64_t>(elems, size * i + size * (size - 1) / 2));
        values.assign(elems, rank);
        const auto root = static_cast<int>(i % size);
        HierarchicalBroadcast(routes.local, routes.world, root, values.data(), 8 * elems);
        CHECK_EQ(values, std::vector<std::int64_t>(elems, root));
        Sizes all(size);
        const std::int64_t own = rank * 100 + i;
        HierarchicalAllgather(routes.local, routes.between, &own, Sizes(size, 8), all.data());
        for (int other = 0; other < size; ++other) CHECK_EQ(all[other], other * 100 + i);
      }
    });
  }
}

TEST("a rank that fails ends the wait of the others") {
  for (const bool is_broadcast : {false, true}) {
    std::string failure;
    try {
      RunRanks(Hosts({0, 1, 1, 2, 2}), [&](const Routes& routes) {
        if (routes.world.rank() == 1) throw Error(Code::kInternal, "no memory");
        std::vector<char> data(5000);
        if (is_broadcast) {
          HierarchicalBroadcast(routes.local, routes.world, 1, data.data(), 5000);
        } else {
          HierarchicalAllgather(routes.local, routes.between, data.data(), Sizes(5, 1000),
                                data.data());
        }
      });
    } catch (const Error& error) {
      failure = error.what();
    }
    CHECK_EQ(failure, "no memory");
  }
}

}  // namespace
}  // namespace keras_ring
