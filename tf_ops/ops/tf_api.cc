#include "ops/tf_api.h"

#include <dlfcn.h>

namespace keras_ring {

// TensorFlow is loaded already; which of its libraries holds a symbol differs between versions.
void* FindSymbol(const char* name) {
  if (void* symbol = dlsym(RTLD_DEFAULT, name)) return symbol;
  for (const char* library : {"libtensorflow_framework.so.2", "libtensorflow_cc.so.2"}) {
    if (void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) {
      void* symbol = dlsym(handle, name);
      dlclose(handle);
      if (symbol != nullptr) return symbol;
    }
  }
  return nullptr;
}

namespace {

TfApi FindAll() {
  TfApi api;
#define KERAS_RING_FIND(name, result, parameters)                             \
  api.name = reinterpret_cast<result(*) parameters>(FindSymbol("TF_" #name)); \
  if (api.name == nullptr)                                                    \
    api.missing += std::string(api.missing.empty() ? "" : ", ") + "TF_" #name;
  KERAS_RING_TF_FUNCTIONS(KERAS_RING_FIND)
#undef KERAS_RING_FIND
  return api;
}

// The numbers of tensorflow::DataType.
struct TypePair {
  DType dtype;
  int tf_dtype;
};
constexpr TypePair kTypes[] = {
    {DType::kFloat32, 1},  {DType::kFloat64, 2},   {DType::kInt32, 3},     {DType::kUint8, 4},
    {DType::kInt16, 5},    {DType::kInt8, 6},      {DType::kComplex64, 8}, {DType::kInt64, 9},
    {DType::kBool, 10},    {DType::kBfloat16, 14}, {DType::kUint16, 17},   {DType::kComplex128, 18},
    {DType::kFloat16, 19}, {DType::kUint32, 22},   {DType::kUint64, 23},
};
static_assert(std::size(kTypes) == std::size(kAllDTypes));

}  // namespace

const TfApi& Tf() {
  static const TfApi api = FindAll();
  return api;
}

// tensorflow::error::Code, which TF_Code repeats.
int TfCode(Code code) {
  switch (code) {
    case Code::kOk:
      return 0;
    case Code::kInvalid:
      return 3;  // INVALID_ARGUMENT
    case Code::kMismatch:
      return 9;  // FAILED_PRECONDITION
    case Code::kPeerLost:
      // ABORTED. UNAVAILABLE would fit better, but in a graph TensorFlow turns that into INTERNAL
      // for every op that it does not know as communication.
      return 10;
    case Code::kTimeout:
      return 4;  // DEADLINE_EXCEEDED
    case Code::kInternal:
      return 13;  // INTERNAL
  }
  return 2;  // UNKNOWN
}

void TfStatus::Set(const Status& status) {
  Tf().SetStatus(status_, TfCode(status.code), status.message.c_str());
}

bool DTypeFromTf(int tf_dtype, DType* dtype) {
  for (const TypePair& pair : kTypes) {
    if (pair.tf_dtype != tf_dtype) continue;
    *dtype = pair.dtype;
    return true;
  }
  return false;
}

int TfFromDType(DType dtype) {
  for (const TypePair& pair : kTypes) {
    if (pair.dtype == dtype) return pair.tf_dtype;
  }
  return 0;
}

}  // namespace keras_ring
