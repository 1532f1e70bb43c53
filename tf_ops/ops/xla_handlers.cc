#include "ops/xla_handlers.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "ops/node.h"
#include "ops/process.h"
#include "ops/tf_api.h"
#include "ops/xla_api.h"
#include "ops/xla_completions.h"

namespace keras_ring {
namespace {

XlaError* ToXla(const XlaApi& xla, const Status& status) {
  if (status.ok()) return nullptr;
  XlaErrorCreate call{sizeof call, nullptr, status.message.c_str(), TfCode(status.code)};
  return xla.error_create(&call);
}

// Takes an error of XLA's and returns its message; "" for none.
std::string TakeMessage(const XlaApi& xla, XlaError* error) {
  if (error == nullptr) return "";
  XlaErrorGetMessage get{sizeof get, nullptr, error, nullptr};
  xla.error_get_message(&get);
  const std::string message = get.message;
  XlaErrorDestroy destroy{sizeof destroy, nullptr, error};
  xla.error_destroy(&destroy);
  return message;
}

// How one run of a call ends: at once, while it is being submitted, or later through a future.
class Ending {
 public:
  explicit Ending(const XlaApi& xla) : xla_(xla) {}

  // The request is done. Thread: any.
  void Finish(const Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_finished_ = true;
    status_ = status;
    if (future_ != nullptr) Complete();
  }

  // The request was submitted: what the handler returns.
  XlaError* Return(XlaCallFrame* frame) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_finished_) return ToXla(xla_, status_);
    XlaFutureCall create{sizeof create, nullptr, nullptr, nullptr};
    if (XlaError* const error = xla_.future_create(&create)) return error;
    future_ = create.future;
    frame->future = future_;
    return nullptr;
  }

 private:
  void Complete() {
    TheXlaCompletions().Push([xla = &xla_, future = future_, status = status_] {
      XlaFutureCall call{sizeof call, nullptr, future, ToXla(*xla, status)};
      TakeMessage(*xla,
                  status.ok() ? xla->future_set_available(&call) : xla->future_set_error(&call));
    });
  }

  const XlaApi& xla_;
  std::mutex mutex_;
  bool is_finished_ = false;     // guarded by mutex_
  Status status_;                // guarded by mutex_
  XlaFuture* future_ = nullptr;  // guarded by mutex_
};

const XlaBytes& StringAttribute(const XlaAttributes& attributes, const char* name) {
  for (std::int64_t i = 0; i < attributes.size; ++i) {
    const XlaBytes& its_name = *attributes.names[i];
    if (attributes.types[i] != kXlaStringAttribute || its_name.size != std::strlen(name) ||
        std::memcmp(its_name.data, name, its_name.size) != 0) {
      continue;
    }
    return *static_cast<const XlaBytes*>(attributes.values[i]);
  }
  throw Error(Code::kInternal, std::string("a custom call of XLA's lacks the attribute ") + name);
}

Shape ShapeOf(const XlaBuffer& buffer) { return Shape(buffer.dims, buffer.dims + buffer.rank); }

Node NodeOf(Kind kind, const XlaCallFrame& frame) {
  return ReadNode(kind, [&frame](const char* name) {
    const XlaBytes& value = StringAttribute(frame.attributes, name);
    return std::string(value.data, value.size);
  });
}

Request MakeRequest(const Node& node, const XlaCallFrame& frame) {
  const Kind kind = node.signature.kind;
  Request request;
  request.name = node.name;
  request.signature = node.signature;
  const std::int64_t num_tensors = frame.arguments.size - 1;
  // Apart from the numbers of TensorFlow's runs.
  request.run = -*static_cast<const std::int64_t*>(frame.arguments.buffers[num_tensors]->data);
  for (std::int64_t i = 0; i < num_tensors; ++i) {
    const XlaBuffer& buffer = *frame.arguments.buffers[i];
    DType dtype;
    if (!DTypeFromXla(buffer.dtype, &dtype)) {
      throw Error(Code::kInternal, Describe(request) + ": a tensor of a type that XLA has alone");
    }
    request.inputs.push_back(buffer.data);
    request.signature.dtypes.push_back(dtype);
    request.signature.shapes.push_back(ShapeOf(buffer));
  }
  std::vector<void*> results;
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < frame.results.size; ++i) {
    const XlaBuffer& buffer = *frame.results.buffers[i];
    results.push_back(buffer.data);
    rows.push_back(buffer.rank == 0 ? 1 : buffer.dims[0]);
  }
  if (!NeedsRows(kind)) {
    request.outputs = std::move(results);
    return request;
  }
  // XLA has made room already. The shapes stay closed, so that ranks which bring other numbers of
  // rows are refused instead of getting no room.
  if (HasOpenRows(kind)) {
    for (const Shape& shape : request.signature.shapes) {
      request.rows.push_back(shape.empty() ? 0 : shape[0]);
    }
  }
  request.allocate = [results = std::move(results), rows = std::move(rows)](
                         std::size_t i, std::int64_t wanted) -> void* {
    return wanted == rows[i] ? results[i] : nullptr;
  };
  return request;
}

// XLA asks which version of its interface a handler was built for.
bool AnswerMetadata(const XlaCallFrame& frame) {
  if (frame.extension == nullptr || frame.extension->type != kXlaMetadataExtension) return false;
  XlaMetadata* const metadata = reinterpret_cast<XlaMetadataExtension*>(frame.extension)->metadata;
  // It takes its own version only. One binary knows what has the same layout in all. The frame of
  // this question has no interface in it before 2.21.
  metadata->version = FindXlaApi()->version;
  metadata->traits = 0;
  if (metadata->struct_size >= sizeof(XlaMetadata)) metadata->state_type = 0;
  return true;
}

// Gives each run of a program a number, which its other calls get as their last argument: XLA has
// none that differs by run.
XlaError* NumberRun(XlaCallFrame* frame) {
  static std::atomic<std::int64_t> last{0};
  if (!AnswerMetadata(*frame)) {
    *static_cast<std::int64_t*>(frame->results.buffers[0]->data) = ++last;
  }
  return nullptr;
}

template <Kind kind>
XlaError* Handle(XlaCallFrame* frame) {
  if (AnswerMetadata(*frame)) return nullptr;
  const XlaApi& xla = *frame->api;
  const auto ending = std::make_shared<Ending>(xla);
  try {
    const Node node = NodeOf(kind, *frame);
    Request request = MakeRequest(node, *frame);
    request.done = [ending](const Status& result) { ending->Finish(result); };
    Submit(node.process_set, std::move(request));
    return ending->Return(frame);
  } catch (const Error& error) {
    return ToXla(xla, error.status());
  } catch (const std::exception& error) {
    return ToXla(xla, {Code::kInternal, std::string(KindName(kind)) + ": " + error.what()});
  }
}

std::string Register(const XlaApi& xla, const char* what, XlaHandler* handler) {
  const std::string name = std::string("keras_ring_") + what;
  const std::string platform = "Host";
  XlaHandlerRegister call{sizeof call,
                          nullptr,
                          {name.data(), name.size()},
                          {platform.data(), platform.size()},
                          nullptr,
                          nullptr,
                          nullptr,
                          handler,
                          0};
  return TakeMessage(xla, xla.handler_register(&call));
}

template <Kind kind>
std::string Register(const XlaApi& xla) {
  return Register(xla, KindName(kind), Handle<kind>);
}

}  // namespace

std::string RegisterXlaHandlers() {
  const XlaApi* const xla = FindXlaApi();
  if (xla == nullptr) return "this TensorFlow has no interface of XLA for foreign functions";
  for (const std::string& message :
       {Register<Kind::kAllreduce>(*xla), Register<Kind::kReducescatter>(*xla),
        Register<Kind::kAllgather>(*xla), Register<Kind::kBroadcast>(*xla),
        Register<Kind::kBarrier>(*xla), Register(*xla, "run", NumberRun)}) {
    if (!message.empty()) return message;
  }
  return "";
}

}  // namespace keras_ring
