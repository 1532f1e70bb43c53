// Memory that is never given back. When a generation fails, the network may still write to what was
// being received; a generation fails once, so it is not much.
#ifndef KERAS_RING_TRANSPORT_KEPT_H_
#define KERAS_RING_TRANSPORT_KEPT_H_

#include <memory>

namespace keras_ring {

// Until the process ends. Thread: any.
void KeepForever(std::shared_ptr<void> memory);

}  // namespace keras_ring

#endif  // KERAS_RING_TRANSPORT_KEPT_H_
