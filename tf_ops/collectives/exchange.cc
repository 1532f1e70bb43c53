#include "collectives/exchange.h"

#include <algorithm>
#include <deque>

namespace keras_ring {
namespace {

// How many receives are posted, and how many sends are under way, at once. Four segments keep a
// wire busy while one is being reduced; more only costs memory.
constexpr std::int64_t kWindow = 4;

constexpr Transport::Transfer kNothing = -1;

class Runner {
 public:
  Runner(const Wire& wire, ExchangePlan* plan) : wire_(wire), plan_(plan) {}

  void Run() {
    const std::int64_t num_exchanges = plan_->num_exchanges();
    for (std::int64_t arrived = 0; arrived < num_exchanges; ++arrived) {
      PostWhatIsFree(arrived);
      const Transport::Transfer recv = recvs_.front();
      recvs_.pop_front();
      if (recv != kNothing) wire_.transport->Wait(recv, wire_.idle);
      plan_->Received(arrived);
    }
    PostWhatIsFree(num_exchanges);
    WaitForSendsBelow(num_exchanges);
  }

 private:
  // Posts everything that may be under way once the exchanges below `arrived` have arrived. A send
  // is posted after the receive of its own number: then the memory that both use is free.
  void PostWhatIsFree(std::int64_t arrived) {
    const std::int64_t end = std::min(plan_->num_exchanges(), arrived + kWindow);
    for (bool is_done = false; !is_done;) {
      is_done = true;
      for (; received_ < end && plan_->MemoryDependsOn(received_) < arrived &&
             plan_->OverwritesSendsBelow(received_) <= sent_;
           is_done = false) {
        PostRecv();
      }
      for (; sent_ < received_ && plan_->SendDependsOn(sent_) < arrived; is_done = false) {
        PostSend();
      }
    }
  }

  void PostRecv() {
    WaitForSendsBelow(plan_->OverwritesSendsBelow(received_));
    const MutableBytes target = plan_->RecvTarget(received_++);
    recvs_.push_back(target.bytes == 0
                         ? kNothing
                         : wire_.transport->Recv(wire_.prev(), target.data, target.bytes));
  }

  void PostSend() {
    WaitForSendsBelow(sent_ - kWindow + 1);
    const ConstBytes source = plan_->SendSource(sent_++);
    sends_.push_back(source.bytes == 0
                         ? kNothing
                         : wire_.transport->Send(wire_.next(), source.data, source.bytes));
  }

  // Cannot deadlock: the receiver's turn at these messages depends on earlier ones only, all of
  // which have been sent.
  void WaitForSendsBelow(std::int64_t end) {
    for (; left_ < end && left_ < sent_; ++left_) {
      if (sends_.front() != kNothing) wire_.transport->Wait(sends_.front(), wire_.idle);
      sends_.pop_front();
    }
  }

  const Wire& wire_;
  ExchangePlan* const plan_;
  std::int64_t received_ = 0;  // receives posted
  std::int64_t sent_ = 0;      // sends posted
  std::int64_t left_ = 0;      // sends that have left
  std::deque<Transport::Transfer> recvs_;
  std::deque<Transport::Transfer> sends_;
};

}  // namespace

void RunExchanges(const Wire& wire, ExchangePlan* plan) { Runner(wire, plan).Run(); }

}  // namespace keras_ring
