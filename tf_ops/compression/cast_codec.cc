#include "compression/cast_codec.h"

#include "reduce/narrow.h"

namespace keras_ring {

std::size_t CastCodec::PayloadBytes(std::int64_t elems) const {
  return static_cast<std::size_t>(elems) * DTypeBytes(narrow_);
}

void CastCodec::Encode(const void* values, std::int64_t elems, void* payload) {
  Narrow(wide_, values, narrow_, payload, elems);
}

void CastCodec::Decode(const void* payload, std::int64_t elems, void* values) {
  Expand(narrow_, payload, wide_, values, elems);
}

}  // namespace keras_ring
