#include "collectives/windows.h"

#include <cstring>

#include "reduce/copy.h"

namespace keras_ring {
namespace {

constexpr std::int64_t kPastCacheBytes = 8 * 1024 * 1024;

}  // namespace

bool IsPastCache(std::int64_t bytes) { return bytes >= kPastCacheBytes; }

void CopyResult(void* to, const void* from, std::int64_t bytes, bool is_past_cache) {
  if (bytes == 0) return;
  if (is_past_cache) {
    CopyPastCache(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void AwaitAll(const LocalWire& wire, Arena::Stage stage, std::int64_t windows) {
  Await(wire, [&] { return wire.arena->HaveAll(stage, windows); });
}

void FinishAt(const LocalWire& wire, std::int64_t windows) {
  for (const auto stage : {Arena::kPacked, Arena::kReduced, Arena::kCopied}) {
    if (wire.arena->Progress(wire.arena->local_rank(), stage) < windows) {
      wire.arena->SetProgress(stage, windows);
    }
  }
  wire.arena->first_window = windows;
}

SlotCopies::SlotCopies(const Bucket& bucket)
    : elem_bytes_(static_cast<std::int64_t>(DTypeBytes(bucket.dtype))) {
  std::int64_t bytes = 0;
  for (const BucketTensor& tensor : bucket.tensors) bytes += tensor.elems * elem_bytes_;
  is_past_cache_ = IsPastCache(bytes);
}

void SlotCopies::Pack(const std::vector<BucketView::Span>& spans, char* slot) const {
  for (const auto& span : spans) {
    std::memcpy(slot + span.offset * elem_bytes_, span.input, span.elems * elem_bytes_);
  }
}

void SlotCopies::CopyOut(const std::vector<BucketView::Span>& spans, const char* slot) const {
  for (const auto& span : spans) {
    const char* const from = slot + span.offset * elem_bytes_;
    const std::int64_t bytes = span.elems * elem_bytes_;
    // In place the memory is in the cache, since it was read a moment ago.
    CopyResult(span.output, from, bytes, is_past_cache_ && span.output != span.input);
  }
}

}  // namespace keras_ring
