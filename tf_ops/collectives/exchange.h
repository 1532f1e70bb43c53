// Runs a list of exchanges with the two neighbours of a ring: the only loop that posts, overlaps
// and waits. What is sent and what happens to what arrives is the plan's business.
#ifndef KERAS_RING_COLLECTIVES_EXCHANGE_H_
#define KERAS_RING_COLLECTIVES_EXCHANGE_H_

#include <cstddef>
#include <cstdint>

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
  // What to send and where to receive; zero bytes: nothing, on both ends.
  virtual ConstBytes SendSource(std::int64_t i) = 0;
  virtual MutableBytes RecvTarget(std::int64_t i) = 0;
  virtual void Received(std::int64_t i) = 0;
};

void RunExchanges(const Wire& wire, ExchangePlan* plan);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_EXCHANGE_H_
