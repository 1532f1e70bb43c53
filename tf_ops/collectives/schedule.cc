#include "collectives/schedule.h"

#include <algorithm>

namespace keras_ring {

Range PartOf(std::int64_t elems, int parts, int index) {
  const std::int64_t base = elems / parts;
  const std::int64_t extra = elems % parts;
  const std::int64_t begin = index * base + std::min<std::int64_t>(index, extra);
  return Range{begin, begin + base + (index < extra ? 1 : 0)};
}

std::vector<RingStep> RingAllreduceSteps(int rank, int size) {
  const auto chunk = [size](int index) { return (index % size + size) % size; };
  std::vector<RingStep> steps;
  for (int step = 0; step < size - 1; ++step) {
    steps.push_back({chunk(rank - step), chunk(rank - step - 1), /*reduces=*/true});
  }
  for (int step = 0; step < size - 1; ++step) {
    steps.push_back({chunk(rank + 1 - step), chunk(rank - step), /*reduces=*/false});
  }
  return steps;
}

std::vector<RingStep> ReducescatterSteps(int rank, int size) {
  std::vector<RingStep> steps;
  for (int step = 0; step < size - 1; ++step) {
    steps.push_back({(rank - step - 1 + size) % size, (rank - step - 2 + 2 * size) % size,
                     /*reduces=*/true});
  }
  return steps;
}

std::vector<RingStep> RingAllgatherSteps(int rank, int size) {
  std::vector<RingStep> steps;
  for (int step = 0; step < size - 1; ++step) {
    steps.push_back({(rank - step + size) % size, (rank - step - 1 + size) % size, false});
  }
  return steps;
}

std::vector<SlabStep> PipelineOrder(std::int64_t num_slabs, int num_steps, int depth) {
  const std::int64_t stagger = std::max((num_steps + depth - 1) / depth, 1);
  std::vector<SlabStep> order;
  order.reserve(num_slabs * num_steps);
  const std::int64_t end = num_slabs == 0 ? 0 : (num_slabs - 1) * stagger + num_steps;
  for (std::int64_t time = 0; time < end; ++time) {
    const std::int64_t first = std::max<std::int64_t>(0, (time - num_steps + stagger) / stagger);
    for (std::int64_t slab = first; slab < num_slabs && slab * stagger <= time; ++slab) {
      const std::int64_t step = time - slab * stagger;
      if (step < num_steps) order.push_back({slab, static_cast<int>(step)});
    }
  }
  return order;
}

TreeLinks BroadcastTree(int rank, int size, int root) {
  const int place = (rank - root + size) % size;
  TreeLinks links;
  if (place > 0) links.parent = ((place - 1) / 2 + root) % size;
  for (int child = 2 * place + 1; child <= 2 * place + 2 && child < size; ++child) {
    links.children.push_back((child + root) % size);
  }
  return links;
}

}  // namespace keras_ring
