#include "collectives/exchange.h"

#include <algorithm>

namespace keras_ring {
namespace {

// How many receives are posted, and how many sends are under way, at once. A few segments keep a
// wire busy while one is being reduced; more only costs memory.
constexpr std::int64_t kWindow = 8;

constexpr Transport::Transfer kNothing = -1;

}  // namespace

Exchanges::Exchanges(const Wire& wire, ExchangePlan* plan)
    : wire_(wire), plan_(plan), next_(wire.next()), prev_(wire.prev()) {}

bool Exchanges::is_done() const {
  return arrived_ == plan_->num_exchanges() && left_ == plan_->num_exchanges();
}

bool Exchanges::Advance() {
  const std::int64_t before = received_ + arrived_ + sent_ + left_;
  PostWhatIsFree();
  if (arrived_ < received_ && plan_->MayTouch(arrived_)) {
    if (recvs_.front() == kNothing || wire_.transport->Test(recvs_.front())) {
      recvs_.pop_front();
      plan_->Received(arrived_++);
      PostWhatIsFree();
    }
  } else {
    // One look at one transfer lets all of them go on; so sends are looked at only when there is
    // nothing else to look at, or when something hangs on them.
    HaveLeft(sent_);
  }
  return received_ + arrived_ + sent_ + left_ != before;
}

// A send is posted after the receive of its own number: then the memory that both use is free.
void Exchanges::PostWhatIsFree() {
  const std::int64_t end = std::min(plan_->num_exchanges(), arrived_ + kWindow);
  for (bool is_done = false; !is_done;) {
    is_done = true;
    for (; received_ < end && plan_->MemoryDependsOn(received_) < arrived_ &&
           plan_->OverwritesSendsBelow(received_) <= sent_ && plan_->MayPostRecv(received_) &&
           HaveLeft(plan_->OverwritesSendsBelow(received_));
         is_done = false) {
      const MutableBytes target = plan_->RecvTarget(received_++);
      recvs_.push_back(target.bytes == 0 ? kNothing
                                         : wire_.transport->Recv(prev_, target.data, target.bytes));
    }
    for (; sent_ < received_ && plan_->SendDependsOn(sent_) < arrived_ && plan_->MayTouch(sent_) &&
           HaveLeft(sent_ - kWindow + 1);
         is_done = false) {
      const ConstBytes source = plan_->SendSource(sent_++);
      sends_.push_back(source.bytes == 0 ? kNothing
                                         : wire_.transport->Send(next_, source.data, source.bytes));
    }
  }
}

bool Exchanges::HaveLeft(std::int64_t end) {
  for (; left_ < std::min(end, sent_); ++left_) {
    if (sends_.front() != kNothing && !wire_.transport->Test(sends_.front())) return false;
    sends_.pop_front();
  }
  return true;
}

void RunExchanges(const Wire& wire, ExchangePlan* plan) {
  Exchanges exchanges(wire, plan);
  while (!exchanges.is_done()) {
    const std::uint32_t seen = wire.transport->bell()->count.load();
    if (exchanges.Advance()) {
      wire.idle->Reset();
    } else {
      wire.idle->Step(seen, /*rings=*/false);
    }
  }
}

}  // namespace keras_ring
