// What the collectives in shared memory have in common: waiting for the other ranks of the host,
// and copying between tensors and slots.
#ifndef KERAS_RING_COLLECTIVES_WINDOWS_H_
#define KERAS_RING_COLLECTIVES_WINDOWS_H_

#include <cstdint>
#include <vector>

#include "collectives/bucket_view.h"
#include "collectives/local.h"
#include "collectives/ring.h"
#include "transport/arena.h"

namespace keras_ring {

// Looks at shared memory before sleeping: about 5 us, the time in which a rank that is in step
// arrives. Sleeping and being woken costs ten times as much.
inline constexpr int kLooks = 400;

inline void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until what only shared memory can make true, and for which the bell rings, is true.
template <typename Condition>
void Await(const LocalWire& wire, Condition is_true) {
  const StageTimer timer(wire.stages, Stage::kWait);
  for (int look = 0; look < kLooks; ++look) {
    if (is_true()) return;
    Relax();
  }
  Bell* const bell = wire.arena->bell(wire.arena->local_rank());
  for (;;) {
    const std::uint32_t seen = bell->count.load();
    if (is_true()) break;
    wire.idle->Step(seen, /*rings=*/true);
  }
  wire.idle->Reset();
}

// Waits until all other local ranks have done so many windows.
void AwaitAll(const LocalWire& wire, Arena::Stage stage, std::int64_t windows);

// All ranks leave a collective with the same count of windows, whatever each had to do.
void FinishAt(const LocalWire& wire, std::int64_t windows);

// Whether results of so many bytes fit no cache together with what is read for them.
bool IsPastCache(std::int64_t bytes);

// Copies a part of a result to where it stays.
void CopyResult(void* to, const void* from, std::int64_t bytes, bool is_past_cache);

// Copies between the tensors of a bucket and a slot; the spans' offsets are the slot's.
class SlotCopies {
 public:
  explicit SlotCopies(const Bucket& bucket);

  std::int64_t elem_bytes() const { return elem_bytes_; }
  void Pack(const std::vector<BucketView::Span>& spans, char* slot) const;
  void CopyOut(const std::vector<BucketView::Span>& spans, const char* slot) const;

 private:
  const std::int64_t elem_bytes_;
  bool is_past_cache_ = false;
};

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_WINDOWS_H_
