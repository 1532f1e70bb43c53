// The in-process transport copies a message when it is sent; a network reads the memory later, and
// takes a long message only when the receiver has posted memory for it. This decorator does the
// same, so that memory used too early, and waits that depend on buffering, are found.
#ifndef KERAS_RING_TESTS_NATIVE_LATE_TRANSPORT_H_
#define KERAS_RING_TESTS_NATIVE_LATE_TRANSPORT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "transport/slots.h"
#include "transport/transport.h"

// How many receives each rank has posted for each other; shared by all ranks.
class PostedReceives {
 public:
  explicit PostedReceives(int size) : size_(size), counts_(size * size) {}

  std::atomic<std::int64_t>& at(int receiver, int sender) {
    return counts_[receiver * size_ + sender];
  }

 private:
  const int size_;
  std::vector<std::atomic<std::int64_t>> counts_;
};

class LateTransport : public keras_ring::Transport {
 public:
  LateTransport(std::unique_ptr<keras_ring::Transport> inner, PostedReceives* posted)
      : inner_(std::move(inner)),
        posted_(posted),
        leaving_(inner_->size()),
        num_left_(inner_->size()),
        random_(inner_->rank()) {}

  int rank() const override { return inner_->rank(); }
  const keras_ring::Topology& topology() const override { return inner_->topology(); }

  Transfer Send(int peer, const void* data, std::size_t bytes) override {
    const Transfer transfer = transfers_.Add(Pending{/*is_send=*/true, -1});
    leaving_[peer].push_back({transfer, data, bytes});
    return transfer;
  }

  Transfer Recv(int peer, void* data, std::size_t bytes) override {
    const Transfer transfer = transfers_.Add({/*is_send=*/false, inner_->Recv(peer, data, bytes)});
    ++posted_->at(rank(), peer);
    return transfer;
  }

  bool Test(Transfer transfer) override {
    Progress();
    Pending& pending = transfers_[transfer];
    if (pending.inner < 0 || random_() % 2 == 0 || !inner_->Test(pending.inner)) return false;
    transfers_.Remove(transfer);
    return true;
  }

  void SendControl(int peer, std::string message) override {
    inner_->SendControl(peer, std::move(message));
  }
  bool RecvControl(int* peer, std::string* message) override {
    return inner_->RecvControl(peer, message);
  }
  bool HasUnsentControl() override { return inner_->HasUnsentControl(); }
  int FindLostPeer() override { return inner_->FindLostPeer(); }
  keras_ring::Bell* bell() override { return inner_->bell(); }
  bool MustPoll() const override { return inner_->MustPoll(); }
  keras_ring::Arena* arena() override { return inner_->arena(); }
  void Close() override { inner_->Close(); }

 private:
  struct Pending {
    bool is_send = false;
    Transfer inner = -1;
  };
  struct Leaving {
    Transfer transfer = -1;
    const void* data = nullptr;
    std::size_t bytes = 0;
  };

  // Lets at most one message go to each peer, if that has room for it.
  void Progress() {
    for (int peer = 0; peer < size(); ++peer) {
      auto& queue = leaving_[peer];
      if (queue.empty() || posted_->at(peer, rank()) <= num_left_[peer]) continue;
      const Leaving& first = queue.front();
      transfers_[first.transfer].inner = inner_->Send(peer, first.data, first.bytes);
      ++num_left_[peer];
      queue.pop_front();
    }
  }

  const std::unique_ptr<keras_ring::Transport> inner_;
  PostedReceives* const posted_;
  keras_ring::Slots<Pending> transfers_;
  std::vector<std::deque<Leaving>> leaving_;  // by peer
  std::vector<std::int64_t> num_left_;        // by peer
  std::minstd_rand random_;
};

#endif  // KERAS_RING_TESTS_NATIVE_LATE_TRANSPORT_H_
