#include "collectives/adasum.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/pairwise.h"
#include "collectives/schedule.h"
#include "reduce/blend.h"

namespace keras_ring {
namespace {

// What a tree of ranks has combined so far lies in `own_`, all tensors one after the other. In each
// level two trees of `distance` ranks join: their ranks of the same place exchange halves of what
// they hold, so that each combines one half, and the dot products are summed over both trees.
// Afterwards the halves go the same way back.
class Run {
 public:
  Run(const Wire& wire, const Bucket& bucket)
      : wire_(wire),
        bucket_(bucket),
        elem_bytes_(static_cast<std::int64_t>(AccumulatorBytes(bucket.dtype))) {
    begins_.push_back(0);
    for (const BucketTensor& tensor : bucket.tensors) {
      begins_.push_back(begins_.back() + tensor.elems);
    }
    // Not zeroed: all of `own_` is written, and of `other_` what is used.
    own_.reset(new char[begins_.back() * elem_bytes_]);
    other_.reset(new char[begins_.back() * elem_bytes_]);
    while (2 * num_trees_ <= wire.size()) num_trees_ *= 2;
    num_pairs_ = wire.size() - num_trees_;
  }

  void Go() {
    ReadInputs();
    const Range all{0, begins_.back()};
    const int rank = wire_.rank();
    if (rank < 2 * num_pairs_ && rank % 2 == 1) {
      Send(rank - 1, all);
      Receive(rank - 1, all, own_.get());
    } else {
      if (rank < 2 * num_pairs_) {
        Receive(rank + 1, all, other_.get());
        Combine(all, DotsWithin(all), /*is_first=*/true);
      }
      Join(all);
      if (rank < 2 * num_pairs_) Send(rank + 1, all);
    }
    WriteOutputs();
  }

 private:
  // The rank at a place among those that stand for the trees, and this rank's place.
  int RankAt(int place) const { return place < num_pairs_ ? 2 * place : place + num_pairs_; }
  int OwnPlace() const {
    return wire_.rank() < 2 * num_pairs_ ? wire_.rank() / 2 : wire_.rank() - num_pairs_;
  }

  void Join(Range all) {
    const int place = OwnPlace();
    Range held = all;
    std::vector<Range> given;
    for (int distance = 1; distance < num_trees_; distance *= 2) {
      const int peer = RankAt(place ^ distance);
      const bool is_first = (place & distance) == 0;
      const Range first = PartOf2(held, 0);
      const Range second = PartOf2(held, 1);
      held = is_first ? first : second;
      given.push_back(is_first ? second : first);
      ExchangeBytes(wire_, peer, At(own_, given.back()), peer, At(other_, held));
      Combine(held, SumOverTrees(DotsWithin(held, is_first), place, distance), is_first);
    }
    for (int distance = num_trees_ / 2; distance > 0; distance /= 2) {
      const int peer = RankAt(place ^ distance);
      ExchangeBytes(wire_, peer, At(own_, held), peer, At(own_, given.back()));
      held = Range{std::min(held.begin, given.back().begin), std::max(held.end, given.back().end)};
      given.pop_back();
    }
  }

  static Range PartOf2(Range range, int index) {
    const Range part = PartOf(range.elems(), 2, index);
    return Range{range.begin + part.begin, range.begin + part.end};
  }

  // Of each tensor's part in a range; `a` is what the first tree has, `b` what the second.
  std::vector<Dots> DotsWithin(Range range, bool is_first = true) const {
    std::vector<Dots> dots(bucket_.tensors.size());
    ForTensors(range, [&](std::size_t i, Range part) {
      const void* const own = own_.get() + part.begin * elem_bytes_;
      const void* const other = other_.get() + part.begin * elem_bytes_;
      dots[i] = DotsOf(bucket_.dtype, is_first ? own : other, is_first ? other : own, part.elems());
    });
    return dots;
  }

  // Each pair of ranks adds the same two numbers, so all get the same bits.
  const std::vector<Dots>& SumOverTrees(std::vector<Dots> own_dots, int place, int distance) {
    dots_ = std::move(own_dots);
    other_dots_.resize(dots_.size());
    const std::size_t bytes = dots_.size() * sizeof(Dots);
    for (int step = 1; step <= distance; step *= 2) {
      const int peer = RankAt(place ^ step);
      ExchangeBytes(wire_, peer, {dots_.data(), bytes}, peer, {other_dots_.data(), bytes});
      for (std::size_t i = 0; i < dots_.size(); ++i) {
        dots_[i].ab += other_dots_[i].ab;
        dots_[i].aa += other_dots_[i].aa;
        dots_[i].bb += other_dots_[i].bb;
      }
    }
    return dots_;
  }

  void Combine(Range range, const std::vector<Dots>& dots, bool is_first) {
    ForTensors(range, [&](std::size_t i, Range part) {
      const double weight_a = dots[i].aa == 0 ? 1 : 1 - dots[i].ab / dots[i].aa / 2;
      const double weight_b = dots[i].bb == 0 ? 1 : 1 - dots[i].ab / dots[i].bb / 2;
      char* const own = own_.get() + part.begin * elem_bytes_;
      char* const other = other_.get() + part.begin * elem_bytes_;
      Blend(bucket_.dtype, weight_a, is_first ? own : other, weight_b, is_first ? other : own, own,
            part.elems());
    });
  }

  // Calls `visit(tensor, part)` for the part of each tensor in a range.
  template <typename Visit>
  void ForTensors(Range range, const Visit& visit) const {
    for (std::size_t i = 0; i < bucket_.tensors.size(); ++i) {
      const Range part{std::max(range.begin, begins_[i]), std::min(range.end, begins_[i + 1])};
      if (part.elems() > 0) visit(i, part);
    }
  }

  void Send(int rank, Range range) { ExchangeBytes(wire_, rank, At(own_, range), rank, {}); }
  void Receive(int rank, Range range, char* to) {
    const auto bytes = static_cast<std::size_t>(range.elems() * elem_bytes_);
    ExchangeBytes(wire_, rank, {}, rank, {to + range.begin * elem_bytes_, bytes});
  }

  struct View {
    void* data = nullptr;
    std::size_t bytes = 0;
    operator ConstBytes() const { return {data, bytes}; }
    operator MutableBytes() const { return {data, bytes}; }
  };
  View At(const std::unique_ptr<char[]>& memory, Range range) const {
    return {memory.get() + range.begin * elem_bytes_,
            static_cast<std::size_t>(range.elems() * elem_bytes_)};
  }

  void ReadInputs() {
    for (std::size_t i = 0; i < bucket_.tensors.size(); ++i) {
      ReduceToAccumulators(bucket_.dtype, ReduceOp::kSum, {bucket_.tensors[i].input},
                           bucket_.before, own_.get() + begins_[i] * elem_bytes_,
                           bucket_.tensors[i].elems);
    }
  }

  void WriteOutputs() const {
    for (std::size_t i = 0; i < bucket_.tensors.size(); ++i) {
      ScaleTo(bucket_.dtype, Format::kAccumulator, own_.get() + begins_[i] * elem_bytes_,
              bucket_.after, bucket_.tensors[i].output, bucket_.tensors[i].elems);
    }
  }

  const Wire& wire_;
  const Bucket& bucket_;
  const std::int64_t elem_bytes_;
  std::vector<std::int64_t> begins_;  // of each tensor, and the end, in elements
  std::unique_ptr<char[]> own_;
  std::unique_ptr<char[]> other_;
  std::vector<Dots> dots_;
  std::vector<Dots> other_dots_;
  int num_trees_ = 1;
  int num_pairs_ = 0;
};

}  // namespace

void Adasum(const Wire& wire, const Bucket& bucket) {
  auto run = std::make_unique<Run>(wire, bucket);
  try {
    run->Go();
  } catch (...) {
    // The network may still write to the memory of a failed generation: it is never given back.
    static_cast<void>(run.release());
    throw;
  }
}

}  // namespace keras_ring
