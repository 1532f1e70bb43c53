// The functions of TensorFlow's C API that the ops use, found at run time. With no TensorFlow
// header and no C++ symbol of TensorFlow, one binary serves every TensorFlow that exports these
// functions (2.16 to 2.21 do), and TensorFlow is not needed to build it.
//
// The declarations restate the documented signatures of tensorflow/c/{kernels,ops,tf_tensor,
// tf_status}.h; opaque types stay opaque.
#ifndef KERAS_RING_OPS_TF_API_H_
#define KERAS_RING_OPS_TF_API_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/dtype.h"
#include "core/status.h"

extern "C" {
struct TF_Status;
struct TF_Tensor;
struct TF_OpKernelContext;
struct TF_OpKernelConstruction;
struct TF_AsyncOpKernelDoneCallback;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
}

namespace keras_ring {

// X(name without TF_, result, parameters)
#define KERAS_RING_TF_FUNCTIONS(X)                                                            \
  X(NewStatus, TF_Status*, ())                                                                \
  X(DeleteStatus, void, (TF_Status*))                                                         \
  X(SetStatus, void, (TF_Status*, int code, const char* message))                             \
  X(GetCode, int, (const TF_Status*))                                                         \
  X(Message, const char*, (const TF_Status*))                                                 \
  X(DeleteTensor, void, (TF_Tensor*))                                                         \
  X(TensorType, int, (const TF_Tensor*))                                                      \
  X(NumDims, int, (const TF_Tensor*))                                                         \
  X(Dim, std::int64_t, (const TF_Tensor*, int index))                                         \
  X(TensorData, void*, (const TF_Tensor*))                                                    \
  X(NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char* name))                      \
  X(OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char* spec))            \
  X(OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char* spec))           \
  X(OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char* spec))          \
  X(OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                  \
  X(OpDefinitionBuilderSetShapeInferenceFunction, void,                                       \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))               \
  X(RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                        \
  X(NewShapeHandle, TF_ShapeHandle*, ())                                                      \
  X(DeleteShapeHandle, void, (TF_ShapeHandle*))                                               \
  X(ShapeInferenceContextNumInputs, std::int64_t, (TF_ShapeInferenceContext*))                \
  X(ShapeInferenceContextGetInput, void,                                                      \
    (TF_ShapeInferenceContext*, int index, TF_ShapeHandle*, TF_Status*))                      \
  X(ShapeInferenceContextSetOutput, void,                                                     \
    (TF_ShapeInferenceContext*, int index, TF_ShapeHandle*, TF_Status*))                      \
  X(ShapeInferenceContextVectorFromSize, TF_ShapeHandle*,                                     \
    (TF_ShapeInferenceContext*, std::size_t))                                                 \
  X(ShapeInferenceContextScalar, TF_ShapeHandle*, (TF_ShapeInferenceContext*))                \
  X(ShapeInferenceContextRankKnown, int, (TF_ShapeInferenceContext*, TF_ShapeHandle*))        \
  X(ShapeInferenceContextRank, std::int64_t, (TF_ShapeInferenceContext*, TF_ShapeHandle*))    \
  X(ShapeInferenceContextSubshape, void,                                                      \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, std::int64_t begin, std::int64_t end,        \
     TF_ShapeHandle* result, TF_Status*))                                                     \
  X(ShapeInferenceContextConcatenateShapes, void,                                             \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle * result,    \
     TF_Status*))                                                                             \
  X(NewAsyncKernelBuilder, TF_KernelBuilder*,                                                 \
    (const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),           \
     void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*),              \
     void (*destroy)(void*)))                                                                 \
  X(KernelBuilder_HostMemory, void, (TF_KernelBuilder*, const char* argument))                \
  X(RegisterKernelBuilder, void, (const char* name, TF_KernelBuilder*, TF_Status*))           \
  X(OpKernelConstruction_GetAttrSize, void,                                                   \
    (TF_OpKernelConstruction*, const char* name, std::int32_t* list, std::int32_t* total,     \
     TF_Status*))                                                                             \
  X(OpKernelConstruction_GetAttrString, void,                                                 \
    (TF_OpKernelConstruction*, const char* name, char* value, std::size_t bytes, TF_Status*)) \
  X(OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))               \
  X(OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                         \
  X(NumInputs, int, (TF_OpKernelContext*))                                                    \
  X(GetInput, void, (TF_OpKernelContext*, int index, TF_Tensor**, TF_Status*))                \
  X(SetOutput, void, (TF_OpKernelContext*, int index, const TF_Tensor*, TF_Status*))          \
  X(AllocateOutput, TF_Tensor*,                                                               \
    (TF_OpKernelContext*, int index, int dtype, const std::int64_t* dims, int num_dims,       \
     std::size_t bytes, TF_Status*))                                                          \
  X(ForwardInputOrAllocateOutput, TF_Tensor*,                                                 \
    (TF_OpKernelContext*, const int* candidates, int num_candidates, int index,               \
     const std::int64_t* dims, int num_dims, int* forwarded, TF_Status*))                     \
  X(GetStepId, std::int64_t, (TF_OpKernelContext*))                                           \
  X(GetIterId, std::int64_t, (TF_OpKernelContext*))

struct TfApi {
#define KERAS_RING_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  KERAS_RING_TF_FUNCTIONS(KERAS_RING_MEMBER)
#undef KERAS_RING_MEMBER

  // Names of functions that the TensorFlow in this process lacks; empty when it fits.
  std::string missing;
};

// Looked up once, when the library is loaded into a process that has imported TensorFlow.
const TfApi& Tf();

// A symbol of the TensorFlow in this process; null when it has none of this name.
void* FindSymbol(const char* name);

// A TF_Status that is freed at the end of its scope.
class TfStatus {
 public:
  TfStatus() : status_(Tf().NewStatus()) {}
  ~TfStatus() { Tf().DeleteStatus(status_); }
  TfStatus(const TfStatus&) = delete;
  TfStatus& operator=(const TfStatus&) = delete;

  TF_Status* get() const { return status_; }
  bool ok() const { return Tf().GetCode(status_) == 0; }
  void Set(const Status& status);

 private:
  TF_Status* const status_;
};

// The number of an error for TensorFlow, and for XLA, which uses the same.
int TfCode(Code code);

// Between TensorFlow's number of a type and ours. False: we have no such type.
bool DTypeFromTf(int tf_dtype, DType* dtype);
int TfFromDType(DType dtype);

}  // namespace keras_ring

#endif  // KERAS_RING_OPS_TF_API_H_
