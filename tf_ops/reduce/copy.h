// Copying, past the cache where that pays.
#ifndef KERAS_RING_REDUCE_COPY_H_
#define KERAS_RING_REDUCE_COPY_H_

#include <cstddef>

namespace keras_ring {

// Copies to memory that is not read again soon: without loading it into the cache first, which for
// tensors beyond the cache's size saves a third of the traffic. Plain memcpy where the processor
// offers nothing better.
void CopyPastCache(void* to, const void* from, std::size_t bytes);

}  // namespace keras_ring

#endif  // KERAS_RING_REDUCE_COPY_H_
