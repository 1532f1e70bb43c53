#include "ops/op_defs.h"

#include <vector>

#include "engine/request.h"
#include "ops/tf_api.h"

namespace keras_ring {
namespace {

constexpr char kTypes[] =
    "{bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, half, bfloat16, float, "
    "double, complex64, complex128}";

void OutputsLikeInputs(TF_ShapeInferenceContext* context, TF_Status* status) {
  const TfApi& tf = Tf();
  TF_ShapeHandle* shape = tf.NewShapeHandle();
  const auto num_inputs = static_cast<int>(tf.ShapeInferenceContextNumInputs(context));
  for (int i = 0; i < num_inputs && tf.GetCode(status) == 0; ++i) {
    tf.ShapeInferenceContextGetInput(context, i, shape, status);
    if (tf.GetCode(status) == 0) tf.ShapeInferenceContextSetOutput(context, i, shape, status);
  }
  tf.DeleteShapeHandle(shape);
}

// (n, …) becomes (None, …); a tensor of unknown rank stays one. The splits of an alltoall are a
// vector, and so are those received.
template <Kind kind>
void OutputsWithOpenRows(TF_ShapeInferenceContext* context, TF_Status* status) {
  const TfApi& tf = Tf();
  TF_ShapeHandle* shape = tf.NewShapeHandle();
  TF_ShapeHandle* row = tf.NewShapeHandle();
  TF_ShapeHandle* rows =
      tf.ShapeInferenceContextVectorFromSize(context, static_cast<std::size_t>(-1));
  const auto num_inputs = static_cast<int>(tf.ShapeInferenceContextNumInputs(context));
  for (int i = 0; i < num_inputs && tf.GetCode(status) == 0; ++i) {
    tf.ShapeInferenceContextGetInput(context, i, shape, status);
    if (tf.ShapeInferenceContextRankKnown(context, shape) != 0) {
      const std::int64_t rank = tf.ShapeInferenceContextRank(context, shape);
      if (rank == 0) {
        const std::string message =
            std::string(KindName(kind)) +
            " takes tensors with at least one dimension, but got a scalar; reshape it to (1,).";
        tf.SetStatus(status, 3, message.c_str());
        break;
      }
      tf.ShapeInferenceContextSubshape(context, shape, 1, rank, row, status);
      if (tf.GetCode(status) == 0) {
        tf.ShapeInferenceContextConcatenateShapes(context, rows, row, shape, status);
      }
    }
    if (tf.GetCode(status) == 0) tf.ShapeInferenceContextSetOutput(context, i, shape, status);
  }
  tf.DeleteShapeHandle(rows);
  tf.DeleteShapeHandle(row);
  tf.DeleteShapeHandle(shape);
}

void ScalarOutput(TF_ShapeInferenceContext* context, TF_Status* status) {
  const TfApi& tf = Tf();
  TF_ShapeHandle* scalar = tf.ShapeInferenceContextScalar(context);
  tf.ShapeInferenceContextSetOutput(context, 0, scalar, status);
  tf.DeleteShapeHandle(scalar);
}

struct OpDef {
  const char* name;
  std::vector<std::string> attrs;
  std::vector<const char*> inputs;
  std::vector<const char*> outputs;
  void (*shape)(TF_ShapeInferenceContext*, TF_Status*);
};

std::string Register(const OpDef& op) {
  const TfApi& tf = Tf();
  TF_OpDefinitionBuilder* builder = tf.NewOpDefinitionBuilder(op.name);
  for (const std::string& attr : op.attrs) tf.OpDefinitionBuilderAddAttr(builder, attr.c_str());
  for (const char* const input : op.inputs) tf.OpDefinitionBuilderAddInput(builder, input);
  for (const char* const output : op.outputs) tf.OpDefinitionBuilderAddOutput(builder, output);
  // Stateful: never folded, merged with an equal one, or pruned when nobody reads the result, since
  // the other ranks wait for this one's call.
  tf.OpDefinitionBuilderSetIsStateful(builder, true);
  if (op.shape != nullptr) tf.OpDefinitionBuilderSetShapeInferenceFunction(builder, op.shape);
  TfStatus status;
  tf.RegisterOpDefinition(builder, status.get());
  return status.ok() ? "" : std::string(op.name) + ": " + tf.Message(status.get());
}

}  // namespace

std::string RegisterOps() {
  const std::string name = "tensor_name: string";
  const std::string type = std::string("T: ") + kTypes;
  const std::string count = "N: int >= 1";
  // Its number in this process; the others may know it by another.
  const std::string set = "process_set: string = '0'";
  // Factors are written out as text: a float attribute would round them to float32.
  const std::string prescale = "prescale_factor: string = '1.0'";
  const std::string postscale = "postscale_factor: string = '1.0'";
  const OpDef ops[] = {
      {kAllreduceOp,
       {name, set, type, count, "op: {'mean', 'sum', 'min', 'max', 'product', 'adasum'}", prescale,
        postscale, "compression: {'none', 'fp16', 'bf16'} = 'none'"},
       {"x: N * T"},
       {"y: N * T"},
       OutputsLikeInputs},
      {kReducescatterOp,
       {name, set, type, count, "op: {'mean', 'sum', 'min', 'max', 'product'}", prescale,
        postscale},
       {"x: N * T"},
       {"y: N * T"},
       OutputsWithOpenRows<Kind::kReducescatter>},
      {kAllgatherOp,
       {name, set, type, count},
       {"x: N * T"},
       {"y: N * T"},
       OutputsWithOpenRows<Kind::kAllgather>},
      {kAlltoallOp,
       {name, set, type},
       {"x: T", "splits: int64"},
       {"y: T", "received_splits: int64"},
       OutputsWithOpenRows<Kind::kAlltoall>},
      {kBroadcastOp,
       {name, set, std::string("T: list(") + kTypes + ") >= 1", "root_rank: string"},
       {"x: T"},
       {"y: T"},
       OutputsLikeInputs},
      {kBarrierOp, {name, set}, {}, {}, nullptr},
      {kJoinOp, {name}, {}, {"last: int32"}, ScalarOutput},
  };
  for (const OpDef& op : ops) {
    const std::string message = Register(op);
    if (!message.empty()) return message;
  }
  return "";
}

}  // namespace keras_ring
