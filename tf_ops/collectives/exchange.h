// Runs a list of exchanges with the two neighbours of a ring: the only loop that posts, overlaps
// and waits. What is sent and what happens to what arrives is the plan's business.
#ifndef KERAS_RING_COLLECTIVES_EXCHANGE_H_
#define KERAS_RING_COLLECTIVES_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <deque>

#include "collectives/wire.h"

namespace keras_ring {

struct ConstBytes {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

struct MutableBytes {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// Exchanges are numbered in one order on all ranks. Each function is called in ascending order:
// RecvTarget(i) before SendSource(i), both some numbers ahead of Received(i).
class ExchangePlan {
 public:
  virtual ~ExchangePlan() = default;

  virtual std::int64_t num_exchanges() const = 0;
  // The exchange whose arrival provides what exchange `i` sends, or -1.
  virtual std::int64_t SendDependsOn(std::int64_t i) const = 0;
  // The exchange that must have arrived before the memory which `i` touches is free, or -1.
  virtual std::int64_t MemoryDependsOn(std::int64_t i) const = 0;
  // Exchanges below the returned number must have left before what `i` receives may be written.
  virtual std::int64_t OverwritesSendsBelow(std::int64_t i) const = 0;
  // Whether what else has to happen on this host has happened, so that RecvTarget(i) may be called;
  // or the two others, SendSource(i) and Received(i).
  virtual bool MayPostRecv(std::int64_t) { return true; }
  virtual bool MayTouch(std::int64_t) { return true; }
  // What to send and where to receive; zero bytes: nothing, on both ends.
  virtual ConstBytes SendSource(std::int64_t i) = 0;
  virtual MutableBytes RecvTarget(std::int64_t i) = 0;
  virtual void Received(std::int64_t i) = 0;
};

// A plan under way. The wire and the plan must outlive it.
class Exchanges {
 public:
  Exchanges(const Wire& wire, ExchangePlan* plan);

  // Goes on as far as that is possible without waiting, but works on one arrival at most, so that
  // the caller can do what is due elsewhere. Whether anything was done.
  bool Advance();
  bool is_done() const;
  // Whether the network has something to do, so that it must be looked at again and again.
  bool is_in_flight() const { return !recvs_.empty() || !sends_.empty(); }

 private:
  void PostWhatIsFree();
  // Whether the sends below `end`, as far as they were posted, have left.
  bool HaveLeft(std::int64_t end);

  const Wire& wire_;
  ExchangePlan* const plan_;
  const int next_;
  const int prev_;
  std::int64_t received_ = 0;  // receives posted
  std::int64_t arrived_ = 0;   // of these, arrived
  std::int64_t sent_ = 0;      // sends posted
  std::int64_t left_ = 0;      // of these, left
  std::deque<Transport::Transfer> recvs_;
  std::deque<Transport::Transfer> sends_;
};

void RunExchanges(const Wire& wire, ExchangePlan* plan);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_EXCHANGE_H_
