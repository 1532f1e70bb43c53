#include "ops/xla_api.h"

#include <iterator>

#include "ops/tf_api.h"

namespace keras_ring {
namespace {

// The numbers of xla::PrimitiveType.
struct TypePair {
  DType dtype;
  int xla_dtype;
};
constexpr TypePair kTypes[] = {
    {DType::kBool, 1},       {DType::kInt8, 2},      {DType::kInt16, 3},
    {DType::kInt32, 4},      {DType::kInt64, 5},     {DType::kUint8, 6},
    {DType::kUint16, 7},     {DType::kUint32, 8},    {DType::kUint64, 9},
    {DType::kFloat16, 10},   {DType::kFloat32, 11},  {DType::kFloat64, 12},
    {DType::kComplex64, 15}, {DType::kBfloat16, 16}, {DType::kComplex128, 18},
};
static_assert(std::size(kTypes) == std::size(kAllDTypes));

const XlaApi* Find() {
  // A C++ function without arguments; the C function that forwards to it came with 2.21.
  using Get = const XlaApi*();
  auto* const get = reinterpret_cast<Get*>(FindSymbol("_ZN3xla3ffi12GetXlaFfiApiEv"));
  const XlaApi* const api = get == nullptr ? nullptr : get();
  if (api == nullptr || api->struct_size < sizeof(XlaApi)) return nullptr;
  // 2.20 has version 0.1.
  return api->version.major == 0 && api->version.minor >= 1 ? api : nullptr;
}

}  // namespace

const XlaApi* FindXlaApi() {
  static const XlaApi* const api = Find();
  return api;
}

bool DTypeFromXla(int xla_dtype, DType* dtype) {
  for (const TypePair& pair : kTypes) {
    if (pair.xla_dtype != xla_dtype) continue;
    *dtype = pair.dtype;
    return true;
  }
  return false;
}

}  // namespace keras_ring
