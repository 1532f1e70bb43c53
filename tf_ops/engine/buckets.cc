#include "engine/buckets.h"

#include <algorithm>

namespace keras_ring {
namespace {

// Whether two requests may share a transfer: the arithmetic must be the same.
bool Fits(const Signature& a, const Signature& b) {
  return a.kind == Kind::kAllreduce && b.kind == Kind::kAllreduce && !a.dtypes.empty() &&
         !b.dtypes.empty() && a.dtypes.front() == b.dtypes.front() && a.op == b.op &&
         a.is_mean == b.is_mean && a.is_adasum == b.is_adasum && a.compression == b.compression &&
         a.prescale == b.prescale && a.postscale == b.postscale;
}

}  // namespace

std::vector<std::vector<std::size_t>> PlanBuckets(const std::vector<const Signature*>& batch,
                                                  std::int64_t bucket_bytes) {
  struct Open {
    std::size_t bucket = 0;
    const Signature* signature = nullptr;
    std::int64_t bytes = 0;
  };
  std::vector<std::vector<std::size_t>> buckets;
  std::vector<Open> open;  // the last bucket of each arithmetic
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const Signature& signature = *batch[i];
    const std::int64_t bytes = BytesOf(signature);
    const auto same = std::find_if(open.begin(), open.end(), [&signature](const Open& candidate) {
      return Fits(*candidate.signature, signature);
    });
    if (same != open.end() && same->bytes + bytes <= bucket_bytes) {
      buckets[same->bucket].push_back(i);
      same->bytes += bytes;
      continue;
    }
    buckets.push_back({i});
    const Open started{buckets.size() - 1, &signature, bytes};
    if (same != open.end()) {
      *same = started;
    } else {
      open.push_back(started);
    }
  }
  return buckets;
}

}  // namespace keras_ring
