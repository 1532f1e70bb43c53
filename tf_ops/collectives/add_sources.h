// The arithmetic of a ring's member: what it brings (one tensor, or the inputs of several ranks of
// its host) is added to what has come, in one pass over memory.
#ifndef KERAS_RING_COLLECTIVES_ADD_SOURCES_H_
#define KERAS_RING_COLLECTIVES_ADD_SOURCES_H_

#include <cstdint>
#include <vector>

#include "collectives/ring.h"
#include "reduce/reduce.h"

namespace keras_ring {

// to = op(partial, op(before(sources[0]), before(sources[1]), ...)) with the dtype, operation and
// scales of the bucket. `sources` hold tensor elements, `to` accumulators; `to` may be `partial`
// when that is accumulators, too.
void AddSources(const Bucket& how, Format format, const void* partial,
                const std::vector<const void*>& sources, void* to, std::int64_t elems);

// The same, then scaled by `after` and rounded to tensor elements. `to` may be one of the sources.
void AddSourcesAndScale(const Bucket& how, Format format, const void* partial,
                        const std::vector<const void*>& sources, void* to, std::int64_t elems);

}  // namespace keras_ring

#endif  // KERAS_RING_COLLECTIVES_ADD_SOURCES_H_
