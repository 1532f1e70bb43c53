#include "compression/codec.h"

#include "compression/cast_codec.h"

namespace keras_ring {

const char* CompressionName(Compression compression) {
  switch (compression) {
    case Compression::kNone:
      return "none";
    case Compression::kFp16:
      return "fp16";
    case Compression::kBf16:
      return "bf16";
  }
  return "unknown";
}

std::unique_ptr<Codec> MakeCodec(Compression compression, DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kFloat64) return nullptr;
  switch (compression) {
    case Compression::kNone:
      return nullptr;
    case Compression::kFp16:
      return std::make_unique<CastCodec>(dtype, DType::kFloat16);
    case Compression::kBf16:
      return std::make_unique<CastCodec>(dtype, DType::kBfloat16);
  }
  return nullptr;
}

}  // namespace keras_ring
