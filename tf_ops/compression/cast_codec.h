// Every value as a 16-bit float.
#ifndef KERAS_RING_COMPRESSION_CAST_CODEC_H_
#define KERAS_RING_COMPRESSION_CAST_CODEC_H_

#include "compression/codec.h"

namespace keras_ring {

// `wide`: float32 or float64; `narrow`: float16 or bfloat16. Rounds to nearest, ties to even;
// float16 makes infinity of what is beyond 65504. Keeps nothing between calls.
class CastCodec : public Codec {
 public:
  CastCodec(DType wide, DType narrow) : wide_(wide), narrow_(narrow) {}

  std::size_t PayloadBytes(std::int64_t elems) const override;
  void Encode(const void* values, std::int64_t elems, void* payload) override;
  void Decode(const void* payload, std::int64_t elems, void* values) override;

 private:
  const DType wide_;
  const DType narrow_;
};

}  // namespace keras_ring

#endif  // KERAS_RING_COMPRESSION_CAST_CODEC_H_
