#include "transport/inprocess.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "core/status.h"
#include "transport/slots.h"

namespace keras_ring {

struct InprocessHub::State {
  // What one rank has been sent: data by sender, control in order of arrival.
  struct Inbox {
    std::mutex mutex;
    std::vector<std::deque<std::string>> data;        // guarded by mutex
    std::deque<std::pair<int, std::string>> control;  // guarded by mutex
    Bell bell;
  };

  State(const Topology& ranks, std::size_t slot_bytes) : topology(ranks), inboxes(ranks.size()) {
    for (Inbox& inbox : inboxes) inbox.data.resize(topology.size());
    if (slot_bytes == 0) return;
    const int num_slots =
        topology.num_nodes() == 1 ? Arena::kNumSlots : Arena::kNumSlotsBetweenHosts;
    for (int node = 0; node < topology.num_nodes(); ++node) {
      const auto leader = std::find(topology.node_of.begin(), topology.node_of.end(), node);
      const int local_size =
          topology.local_size(static_cast<int>(leader - topology.node_of.begin()));
      const std::size_t bytes =
          (Arena::Bytes(local_size, slot_bytes, num_slots) + 4095) / 4096 * 4096;
      const std::shared_ptr<void> memory(std::aligned_alloc(4096, bytes), std::free);
      std::memset(memory.get(), 0, bytes);
      memory_of_node.push_back(memory);
    }
    for (int rank = 0; rank < topology.size(); ++rank) {
      const auto& memory = memory_of_node[topology.node_of[rank]];
      arenas.push_back(std::make_unique<Arena>(memory.get(), memory, topology.local_rank(rank),
                                               topology.local_size(rank), slot_bytes, num_slots));
    }
  }

  // In the arena where there is one: there the peers ring it for what they do in shared memory.
  Bell* BellOf(int rank) {
    return arenas.empty() ? &inboxes[rank].bell : arenas[rank]->bell(arenas[rank]->local_rank());
  }

  const Topology topology;
  std::vector<Inbox> inboxes;
  std::vector<std::shared_ptr<void>> memory_of_node;
  std::vector<std::unique_ptr<Arena>> arenas;  // by rank; empty: no shared memory
  std::atomic<int> killed{-1};
};

namespace {

class InprocessTransport : public Transport {
 public:
  InprocessTransport(InprocessHub::State* hub, int rank)
      : hub_(hub), rank_(rank), posted_(hub->topology.size()) {}

  int rank() const override { return rank_; }
  const Topology& topology() const override { return hub_->topology; }

  Transfer Send(int peer, const void* data, std::size_t bytes) override {
    auto& inbox = hub_->inboxes[peer];
    const std::lock_guard<std::mutex> lock(inbox.mutex);
    inbox.data[rank_].emplace_back(static_cast<const char*>(data), bytes);
    hub_->BellOf(peer)->Ring();
    return transfers_.Add(Pending{-1, nullptr, 0, /*is_done=*/true});
  }

  Transfer Recv(int peer, void* data, std::size_t bytes) override {
    const Transfer transfer = transfers_.Add(Pending{peer, data, bytes, /*is_done=*/false});
    posted_[peer].push_back(transfer);
    return transfer;
  }

  bool Test(Transfer transfer) override {
    if (!transfers_[transfer].is_done) Deliver(transfers_[transfer].peer);
    if (!transfers_[transfer].is_done) return false;
    transfers_.Remove(transfer);
    return true;
  }

  void SendControl(int peer, std::string message) override {
    auto& inbox = hub_->inboxes[peer];
    const std::lock_guard<std::mutex> lock(inbox.mutex);
    inbox.control.emplace_back(rank_, std::move(message));
    hub_->BellOf(peer)->Ring();
  }

  bool RecvControl(int* peer, std::string* message) override {
    auto& inbox = hub_->inboxes[rank_];
    const std::lock_guard<std::mutex> lock(inbox.mutex);
    if (inbox.control.empty()) return false;
    *peer = inbox.control.front().first;
    *message = std::move(inbox.control.front().second);
    inbox.control.pop_front();
    return true;
  }

  bool HasUnsentControl() override { return false; }

  int FindLostPeer() override {
    const int killed = hub_->killed.load();
    return killed == rank_ ? -1 : killed;
  }

  Bell* bell() override { return hub_->BellOf(rank_); }
  bool MustPoll() const override { return false; }
  Arena* arena() override { return hub_->arenas.empty() ? nullptr : hub_->arenas[rank_].get(); }

  void Close() override {}

 private:
  struct Pending {
    int peer = -1;
    void* data = nullptr;
    std::size_t bytes = 0;
    bool is_done = false;
  };

  // Gives what `peer` has sent to the receives posted for it, oldest to oldest.
  void Deliver(int peer) {
    auto& inbox = hub_->inboxes[rank_];
    const std::lock_guard<std::mutex> lock(inbox.mutex);
    auto& sent = inbox.data[peer];
    auto& posted = posted_[peer];
    while (!sent.empty() && !posted.empty()) {
      Pending& pending = transfers_[posted.front()];
      if (sent.front().size() != pending.bytes) {
        throw Error(Code::kInternal, "a message of " + std::to_string(sent.front().size()) +
                                         " bytes arrived where " + std::to_string(pending.bytes) +
                                         " were expected");
      }
      if (pending.bytes > 0) std::memcpy(pending.data, sent.front().data(), pending.bytes);
      pending.is_done = true;
      sent.pop_front();
      posted.pop_front();
    }
  }

  InprocessHub::State* const hub_;
  const int rank_;
  std::vector<std::deque<Transfer>> posted_;
  Slots<Pending> transfers_;
};

}  // namespace

InprocessHub::InprocessHub(const Topology& topology, std::size_t slot_bytes)
    : state_(new State(topology, slot_bytes)) {}
InprocessHub::~InprocessHub() = default;

std::unique_ptr<Transport> InprocessHub::Connect(int rank) {
  return std::make_unique<InprocessTransport>(state_.get(), rank);
}

void InprocessHub::Kill(int rank) { state_->killed = rank; }

}  // namespace keras_ring
