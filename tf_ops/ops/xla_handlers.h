// The collectives as XLA's custom calls: what runs in a function with jit_compile=True.
// keras_ring/xla.py writes the calls.
#ifndef KERAS_RING_OPS_XLA_HANDLERS_H_
#define KERAS_RING_OPS_XLA_HANDLERS_H_

#include <string>

namespace keras_ring {

// Registers the handlers; returns what went wrong, "" when nothing did. The ops work without them.
std::string RegisterXlaHandlers();

}  // namespace keras_ring

#endif  // KERAS_RING_OPS_XLA_HANDLERS_H_
