#include "ops/kernels.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "ops/node.h"
#include "ops/op_defs.h"
#include "ops/process.h"
#include "ops/tf_api.h"

namespace keras_ring {
namespace {

// One run of a node: owns its tensors until the request is done or given up.
class Call {
 public:
  Call(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done)
      : context_(context),
        // The pointer is to a std::function on the caller's stack (TF_AsyncOpKernelDoneCallback is
        // only its C name), which is gone when compute returns: keep a copy.
        done_(*reinterpret_cast<std::function<void()>*>(done)) {}
  ~Call() { Release(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Adds tensor `i` of the node to the request. With `makes_output` its output is made too, in the
  // input's memory where TensorFlow has no other use for that.
  void Take(int i, bool makes_output, Request* request) {
    const TfApi& tf = Tf();
    TfStatus status;
    TF_Tensor* input = GetInput(i, status);
    Shape shape;
    for (int d = 0; d < tf.NumDims(input); ++d) shape.push_back(tf.Dim(input, d));
    DType dtype;
    if (!DTypeFromTf(tf.TensorType(input), &dtype)) {
      tf.DeleteTensor(input);
      throw Error(Code::kInternal, "a tensor of a type that the op does not list");
    }
    if (makes_output) {
      // A reference of ours would keep TensorFlow from handing the memory on.
      tf.DeleteTensor(input);
      int forwarded = -1;
      TF_Tensor* output =
          tf.ForwardInputOrAllocateOutput(context_, &i, 1, i, shape.data(),
                                          static_cast<int>(shape.size()), &forwarded, status.get());
      Check(status);
      tensors_.push_back(output);
      request->outputs.push_back(tf.TensorData(output));
      input = GetInput(i, status);
    }
    tensors_.push_back(input);
    request->inputs.push_back(tf.TensorData(input));
    request->signature.dtypes.push_back(dtype);
    request->signature.shapes.push_back(std::move(shape));
  }

  // Makes output `i` with `rows` rows of the input's row shape; null when there is no memory.
  void* Allocate(std::size_t i, std::int64_t rows, const Signature& signature) {
    Shape shape = signature.shapes[i];
    if (!shape.empty()) shape[0] = rows;
    TfStatus status;
    TF_Tensor* output = Tf().AllocateOutput(
        context_, static_cast<int>(i), TfFromDType(signature.dtypes[i]), shape.data(),
        static_cast<int>(shape.size()),
        static_cast<std::size_t>(NumElems(shape)) * DTypeBytes(signature.dtypes[i]), status.get());
    if (!status.ok()) return nullptr;
    tensors_.push_back(output);
    return Tf().TensorData(output);
  }

  // Makes room for the scalar result of a join.
  void* AllocateRank() {
    TfStatus status;
    TF_Tensor* const output = Tf().AllocateOutput(context_, 0, TfFromDType(DType::kInt32), nullptr,
                                                  0, sizeof(std::int32_t), status.get());
    Check(status);
    tensors_.push_back(output);
    return Tf().TensorData(output);
  }

  // Makes input `i` output `i`, as tf.identity does.
  void Share(std::size_t i) {
    TfStatus status;
    TF_Tensor* const input = GetInput(static_cast<int>(i), status);
    tensors_.push_back(input);
    Tf().SetOutput(context_, static_cast<int>(i), input, status.get());
    Check(status);
  }

  void Finish(const Status& status) {
    if (status.ok()) {
      Release();
    } else {
      TfStatus tf_status;
      tf_status.Set(status);
      Tf().OpKernelContext_Failure(context_, tf_status.get());
    }
    done_();
  }

 private:
  static void Check(const TfStatus& status) {
    if (!status.ok()) throw Error(Code::kInternal, Tf().Message(status.get()));
  }

  TF_Tensor* GetInput(int i, const TfStatus& status) {
    TF_Tensor* input = nullptr;
    Tf().GetInput(context_, i, &input, status.get());
    Check(status);
    return input;
  }

  void Release() {
    for (TF_Tensor* tensor : tensors_) Tf().DeleteTensor(tensor);
    tensors_.clear();
  }

  TF_OpKernelContext* const context_;
  const std::function<void()> done_;
  std::vector<TF_Tensor*> tensors_;
};

// The iteration of a loop is part of the name: iterations may run side by side.
std::string NameInLoop(const std::string& name, std::int64_t iteration) {
  if (iteration == 0) return name;
  const std::size_t hash = std::min(name.find('#'), name.size());
  return name.substr(0, hash) + "@" + std::to_string(iteration) + name.substr(hash);
}

void Compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const Node& node = *static_cast<Node*>(kernel);
  const auto call = std::make_shared<Call>(context, done);
  try {
    Request request;
    request.name = NameInLoop(node.name, Tf().GetIterId(context));
    request.run = Tf().GetStepId(context);
    request.signature = node.signature;
    const Kind kind = node.signature.kind;
    const bool makes_output = !NeedsRows(kind) && kind != Kind::kBroadcast;
    for (int i = 0; i < Tf().NumInputs(context); ++i) {
      call->Take(i, makes_output, &request);
    }
    if (HasOpenRows(kind)) {
      for (Shape& shape : request.signature.shapes) {
        if (shape.empty()) continue;  // refused by the engine
        request.rows.push_back(std::exchange(shape[0], -1));
        if (kind == Kind::kAlltoall) break;  // the splits are not opened
      }
    }
    if (kind == Kind::kJoin) request.outputs.push_back(call->AllocateRank());
    if (!makes_output) {
      request.share = [call](std::size_t i) { call->Share(i); };
      request.allocate = [call, signature = request.signature](std::size_t i, std::int64_t rows) {
        return call->Allocate(i, rows, signature);
      };
    }
    request.done = [call](const Status& result) { call->Finish(result); };
    request.keep_alive = call;
    Submit(node.process_set, std::move(request));
  } catch (const Error& error) {
    call->Finish(error.status());
  }
}

std::string StringAttr(TF_OpKernelConstruction* construction, const char* name) {
  TfStatus status;
  std::int32_t list = 0;
  std::int32_t bytes = 0;
  Tf().OpKernelConstruction_GetAttrSize(construction, name, &list, &bytes, status.get());
  std::string value(bytes, '\0');
  if (status.ok() && bytes > 0) {
    Tf().OpKernelConstruction_GetAttrString(construction, name, value.data(), bytes, status.get());
  }
  if (!status.ok()) throw Error(Code::kInternal, Tf().Message(status.get()));
  return value;
}

template <Kind kind>
void* Create(TF_OpKernelConstruction* construction) {
  auto node = std::make_unique<Node>();
  try {
    *node =
        ReadNode(kind, [construction](const char* name) { return StringAttr(construction, name); });
  } catch (const Error& error) {
    TfStatus status;
    status.Set(error.status());
    Tf().OpKernelConstruction_Failure(construction, status.get());
  }
  return node.release();
}

void Destroy(void* kernel) { delete static_cast<Node*>(kernel); }

template <Kind kind>
std::string Register(const char* op) {
  for (const char* device : {"CPU", "GPU"}) {
    TF_KernelBuilder* builder =
        Tf().NewAsyncKernelBuilder(op, device, Create<kind>, Compute, Destroy);
    if (std::string(device) == "GPU" && kind == Kind::kJoin) {
      Tf().KernelBuilder_HostMemory(builder, "last");
    } else if (std::string(device) == "GPU" && kind != Kind::kBarrier) {
      // Rings run on the host: TensorFlow copies to and fro.
      Tf().KernelBuilder_HostMemory(builder, "x");
      Tf().KernelBuilder_HostMemory(builder, "y");
      if (kind == Kind::kAlltoall) {
        Tf().KernelBuilder_HostMemory(builder, "splits");
        Tf().KernelBuilder_HostMemory(builder, "received_splits");
      }
    }
    TfStatus status;
    Tf().RegisterKernelBuilder((std::string(op) + device).c_str(), builder, status.get());
    if (!status.ok()) return std::string(op) + ": " + Tf().Message(status.get());
  }
  return "";
}

}  // namespace

std::string RegisterKernels() {
  for (const std::string& message :
       {Register<Kind::kAllreduce>(kAllreduceOp), Register<Kind::kAllgather>(kAllgatherOp),
        Register<Kind::kBroadcast>(kBroadcastOp), Register<Kind::kBarrier>(kBarrierOp),
        Register<Kind::kAlltoall>(kAlltoallOp), Register<Kind::kJoin>(kJoinOp),
        Register<Kind::kReducescatter>(kReducescatterOp)}) {
    if (!message.empty()) return message;
  }
  return "";
}

}  // namespace keras_ring
