#include "collectives/pairwise.h"

#include <algorithm>
#include <cstring>
#include <deque>

namespace keras_ring {
namespace {

// Segments posted at once in each direction.
constexpr std::int64_t kWindow = 4;

std::vector<std::int64_t> Begins(const std::vector<std::int64_t>& bytes) {
  std::vector<std::int64_t> begins;
  std::int64_t begin = 0;
  for (const std::int64_t block : bytes) {
    begins.push_back(begin);
    begin += block;
  }
  return begins;
}

}  // namespace

// In each round one segment has arrived and one has left. A member that is furthest behind waits
// for what the others, being further, have posted already; so somebody can always go on.
void ExchangeBytes(const Wire& wire, int to, ConstBytes source, int from, MutableBytes target) {
  const std::int64_t segment = wire.segment_bytes;
  const auto send_bytes = static_cast<std::int64_t>(source.bytes);
  const auto recv_bytes = static_cast<std::int64_t>(target.bytes);
  const std::int64_t num_sends = (send_bytes + segment - 1) / segment;
  const std::int64_t num_recvs = (recv_bytes + segment - 1) / segment;
  std::deque<Transport::Transfer> sends;
  std::deque<Transport::Transfer> recvs;
  std::int64_t sent = 0;
  std::int64_t received = 0;
  for (std::int64_t round = 0; round < std::max(num_sends, num_recvs); ++round) {
    for (; received < std::min(num_recvs, round + kWindow); ++received) {
      const std::int64_t begin = received * segment;
      recvs.push_back(
          wire.transport->Recv(wire.peer(from), static_cast<char*>(target.data) + begin,
                               static_cast<std::size_t>(std::min(segment, recv_bytes - begin))));
    }
    for (; sent < std::min(num_sends, round + kWindow); ++sent) {
      const std::int64_t begin = sent * segment;
      sends.push_back(
          wire.transport->Send(wire.peer(to), static_cast<const char*>(source.data) + begin,
                               static_cast<std::size_t>(std::min(segment, send_bytes - begin))));
    }
    for (auto* const transfers : {&recvs, &sends}) {
      if (transfers->empty()) continue;
      wire.transport->Wait(transfers->front(), wire.idle);
      transfers->pop_front();
    }
  }
}

void PairwiseAlltoall(const Wire& wire, const Blocks& blocks) {
  const int size = wire.size();
  const int rank = wire.rank();
  const auto send_begins = Begins(blocks.send_bytes);
  const auto recv_begins = Begins(blocks.recv_bytes);
  const auto source = [&](int member) {
    return ConstBytes{static_cast<const char*>(blocks.input) + send_begins[member],
                      static_cast<std::size_t>(blocks.send_bytes[member])};
  };
  const auto target = [&](int member) {
    return MutableBytes{static_cast<char*>(blocks.output) + recv_begins[member],
                        static_cast<std::size_t>(blocks.recv_bytes[member])};
  };
  if (blocks.send_bytes[rank] > 0) {
    std::memcpy(target(rank).data, source(rank).data, source(rank).bytes);
  }
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size;
    const int from = (rank + size - step) % size;
    ExchangeBytes(wire, to, source(to), from, target(from));
  }
}

}  // namespace keras_ring
