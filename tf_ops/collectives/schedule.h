// Who sends what to whom and when, as pure functions: tested for every world size without a thread
// or a wire. Nothing here touches data.
#ifndef KERAS_RING_COLLECTIVES_SCHEDULE_H_
#define KERAS_RING_COLLECTIVES_SCHEDULE_H_

#include <cstdint>
#include <vector>

namespace keras_ring {

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t elems() const { return end - begin; }
};

// Part `index` of `elems` elements cut into `parts`; the first parts are one larger when they do
// not divide.
Range PartOf(std::int64_t elems, int parts, int index);

// One exchange with both neighbours in the ring: send one chunk to the next rank while another
// comes from the previous one.
//
// Reduce-scatter on three ranks; a, b, c are the ranks' own parts of the chunk above them. Each
// rank passes on what it received in the step before, with its own part added:
//
//             chunk 0     chunk 1     chunk 2
//   rank 0    a           a -> 1      a+c... arrives complete as a+b+c of chunk 1 on rank 0
//   step 0    0 sends 0   1 sends 1   2 sends 2
//   step 1    1 sends 0   2 sends 1   0 sends 2     (now sums of two)
//   then      2 holds 0   0 holds 1   1 holds 2     (sums of all three)
//
// Allgather then passes the complete chunks around once more, starting with the one it holds.
struct RingStep {
  int send_chunk = 0;
  int recv_chunk = 0;
  bool reduces = false;
};

// The 2(P-1) steps of a ring allreduce for one rank.
std::vector<RingStep> RingAllreduceSteps(int rank, int size);

// The P-1 steps of a ring reducescatter: rank r ends with the sum of chunk r.
std::vector<RingStep> ReducescatterSteps(int rank, int size);

// The P-1 steps of a ring allgather: chunk r is what rank r brings.
std::vector<RingStep> RingAllgatherSteps(int rank, int size);

// One step of one slab. A slab is the set of segments that have the same position in each chunk; it
// goes through all steps of the ring by itself.
struct SlabStep {
  std::int64_t slab = 0;
  int step = 0;
};

// The order in which all ranks work through the slabs: step s of slab k stands at time s + k *
// stagger, so that at most `depth` slabs are under way and the steps that share a time do not
// depend on each other. The order is the same on every rank, hence messages need no tags.
std::vector<SlabStep> PipelineOrder(std::int64_t num_slabs, int num_steps, int depth);

// A binary tree rooted at `root`: with segments in flight its cost is that of two sends per
// segment, whatever the number of ranks.
struct TreeLinks {
  int parent = -1;
  std::vector<int> children;
};
TreeLinks BroadcastTree(int rank, int size, int root);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_SCHEDULE_H_
