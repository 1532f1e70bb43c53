#include "collectives/schedule.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "check.h"

namespace keras_ring {
namespace {

using check::Note;

const std::vector<int> kSizes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};

TEST("parts follow each other, cover all elements and differ by one at most") {
  for (const int parts : kSizes) {
    for (const std::int64_t elems : {0, 1, 2, 7, 8, 9, 15, 16, 17, 1000003}) {
      const Note note(elems, " elements in ", parts, " parts");
      std::int64_t end = 0;
      for (int index = 0; index < parts; ++index) {
        const Range part = PartOf(elems, parts, index);
        CHECK_EQ(part.begin, end);
        CHECK(part.elems() == elems / parts || part.elems() == elems / parts + 1);
        CHECK(index == 0 || part.elems() <= PartOf(elems, parts, index - 1).elems());
        end = part.end;
      }
      CHECK_EQ(end, elems);
    }
  }
}

TEST("parts of more elements than 32 bits can count are right") {
  const std::int64_t elems = (std::int64_t{1} << 40) + 5;
  CHECK_EQ(PartOf(elems, 9, 8).end, elems);
  CHECK_EQ(PartOf(elems, 9, 4).end, PartOf(elems, 9, 5).begin);
}

// By chunk: how often each rank's own part is in it.
using Held = std::map<int, std::vector<int>>;

TEST("allreduce: every chunk is complete on every rank, each part added once") {
  for (const int size : kSizes) {
    const Note note(size, " ranks");
    std::vector<std::vector<RingStep>> steps;
    std::vector<Held> held(size);
    for (int rank = 0; rank < size; ++rank) {
      steps.push_back(RingAllreduceSteps(rank, size));
      CHECK_EQ(steps[rank].size(), std::size_t(2 * (size - 1)));
      for (int chunk = 0; chunk < size; ++chunk) {
        held[rank][chunk].assign(size, 0);
        held[rank][chunk][rank] = 1;
      }
    }
    for (int step = 0; step < 2 * (size - 1); ++step) {
      const std::vector<Held> before = held;
      for (int rank = 0; rank < size; ++rank) {
        const RingStep own = steps[rank][step];
        const int prev = (rank + size - 1) % size;
        CHECK_EQ(steps[prev][step].send_chunk, own.recv_chunk);
        CHECK_EQ(own.reduces, step < size - 1);
        const std::vector<int>& arrives = before[prev].at(own.recv_chunk);
        std::vector<int>& chunk = held[rank][own.recv_chunk];
        for (int other = 0; other < size; ++other) {
          chunk[other] = arrives[other] + (own.reduces ? chunk[other] : 0);
        }
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      for (int chunk = 0; chunk < size; ++chunk) {
        CHECK_EQ(held[rank][chunk], std::vector<int>(size, 1));
      }
    }
  }
}

TEST("allreduce: a rank sends on what it received one step before") {
  for (const int size : kSizes) {
    for (int rank = 0; rank < size; ++rank) {
      const auto steps = RingAllreduceSteps(rank, size);
      for (std::size_t step = 1; step < steps.size(); ++step) {
        CHECK_EQ(steps[step].send_chunk, steps[step - 1].recv_chunk);
      }
      if (size > 1) CHECK_EQ(steps.front().send_chunk, rank);
    }
  }
}

TEST("allgather: every rank receives every other chunk once, from one who has it") {
  for (const int size : kSizes) {
    const Note note(size, " ranks");
    std::vector<std::vector<bool>> has(size, std::vector<bool>(size, false));
    for (int rank = 0; rank < size; ++rank) has[rank][rank] = true;
    for (int step = 0; step < size - 1; ++step) {
      const auto before = has;
      for (int rank = 0; rank < size; ++rank) {
        const int prev = (rank + size - 1) % size;
        const RingStep own = RingAllgatherSteps(rank, size).at(step);
        CHECK(!own.reduces);
        CHECK_EQ(RingAllgatherSteps(prev, size).at(step).send_chunk, own.recv_chunk);
        CHECK(before[prev][own.recv_chunk]);
        CHECK(!has[rank][own.recv_chunk]);
        has[rank][own.recv_chunk] = true;
      }
    }
    for (const auto& chunks : has) CHECK_EQ(chunks, std::vector<bool>(size, true));
  }
}

TEST("pipeline: every step of every slab is there once, in the order of the steps") {
  for (const int num_steps : {2, 4, 6, 8, 10, 14, 30}) {
    for (const std::int64_t num_slabs : {0, 1, 2, 3, 4, 5, 9, 64}) {
      for (const int depth : {1, 2, 4, 7}) {
        const Note note(num_slabs, " slabs, ", num_steps, " steps, depth ", depth);
        std::vector<int> next(num_slabs, 0);
        for (const SlabStep& one : PipelineOrder(num_slabs, num_steps, depth)) {
          CHECK_EQ(one.step, next.at(one.slab));
          ++next[one.slab];
        }
        CHECK_EQ(next, std::vector<int>(num_slabs, num_steps));
      }
    }
  }
}

TEST("pipeline: a slab begins after the slab whose memory it takes has ended") {
  for (const int num_steps : {2, 4, 6, 8, 10, 14, 30}) {
    for (const int depth : {1, 2, 4, 7}) {
      const Note note(num_steps, " steps, depth ", depth);
      const auto order = PipelineOrder(40, num_steps, depth);
      std::vector<std::size_t> first(40, order.size());
      std::vector<std::size_t> last(40, 0);
      for (std::size_t i = 0; i < order.size(); ++i) {
        first[order[i].slab] = std::min(first[order[i].slab], i);
        last[order[i].slab] = i;
      }
      for (int slab = depth; slab < 40; ++slab) CHECK(last[slab - depth] < first[slab]);
    }
  }
}

TEST("pipeline: with several slabs the step before is not the exchange just before") {
  // Else every exchange would wait for the one before it, and nothing would overlap.
  for (const int num_steps : {4, 8, 14}) {
    const auto order = PipelineOrder(64, num_steps, 4);
    std::size_t num_adjacent = 0;
    for (std::size_t i = 1; i < order.size(); ++i) {
      num_adjacent += order[i].slab == order[i - 1].slab ? 1 : 0;
    }
    const Note note(num_steps, " steps");
    CHECK(num_adjacent * 8 < order.size());
  }
}

TEST("broadcast tree: from any root it reaches every rank in O(log N) hops") {
  for (const int size : kSizes) {
    for (int root = 0; root < size; ++root) {
      const Note note(size, " ranks, root ", root);
      CHECK_EQ(BroadcastTree(root, size, root).parent, -1);
      std::vector<int> reached = {root};
      for (std::size_t i = 0; i < reached.size(); ++i) {
        for (const int child : BroadcastTree(reached[i], size, root).children) {
          CHECK_EQ(BroadcastTree(child, size, root).parent, reached[i]);
          reached.push_back(child);
        }
      }
      for (int rank = 0; rank < size; ++rank) {
        int hops = 0;
        for (int at = rank; at != root; at = BroadcastTree(at, size, root).parent) ++hops;
        CHECK(hops <= std::log2(size));
      }
      std::sort(reached.begin(), reached.end());
      CHECK_EQ(reached.size(), std::size_t(size));
      CHECK_EQ(std::unique(reached.begin(), reached.end()) - reached.begin(), size);
    }
  }
}

}  // namespace
}  // namespace keras_ring
