// Codecs: values -> fewer bytes -> values. A codec knows no transport, no rank and no tensor; who
// calls it when is the collectives' business.
#ifndef KERAS_RING_COMPRESSION_CODEC_H_
#define KERAS_RING_COMPRESSION_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/dtype.h"

namespace keras_ring {

// What a user asks for. The order is part of the control messages.
enum class Compression : std::uint8_t { kNone, kFp16, kBf16 };

inline constexpr Compression kAllCompressions[] = {Compression::kNone, Compression::kFp16,
                                                   Compression::kBf16};

const char* CompressionName(Compression compression);

// Of one element type, given to the factory. Encoding may lose; decoding what another rank encoded
// gives the same bits on every rank. One that keeps something between calls (what was lost, to add
// it next time) wraps another and lives as long as its tensor. Not for several threads at once.
class Codec {
 public:
  virtual ~Codec() = default;

  // Bytes of the payload of so many values. The receiver has to know it beforehand, so it depends
  // on nothing else; what needs less fills up the rest.
  virtual std::size_t PayloadBytes(std::int64_t elems) const = 0;
  virtual void Encode(const void* values, std::int64_t elems, void* payload) = 0;
  virtual void Decode(const void* payload, std::int64_t elems, void* values) = 0;
};

// Null where values of `dtype` travel as they are: without compression, and for all but float32 and
// float64.
std::unique_ptr<Codec> MakeCodec(Compression compression, DType dtype);

}  // namespace keras_ring

#endif  // KERAS_RING_COMPRESSION_CODEC_H_
