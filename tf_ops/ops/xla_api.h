// XLA's C interface for foreign functions (xla/ffi/api/c_api.h), as far as the collectives use it,
// found at run time like TensorFlow's (see tf_api.h). TensorFlow 2.20 and 2.21 have it; what is
// declared here has the same layout in both. Every struct begins with its size, by which both sides
// tell what the other knows.
#ifndef KERAS_RING_OPS_XLA_API_H_
#define KERAS_RING_OPS_XLA_API_H_

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace keras_ring {

struct XlaApi;
struct XlaError;    // opaque; whoever receives one destroys it
struct XlaFuture;   // opaque; XLA destroys it once it was completed
struct XlaContext;  // opaque; valid during the call of a handler only

struct XlaExtension {
  std::size_t struct_size;
  int type;
  XlaExtension* next;
};

struct XlaBytes {
  const char* data;
  std::size_t size;
};

struct XlaVersion {
  std::size_t struct_size;
  XlaExtension* extension;
  int major;
  int minor;
};

struct XlaBuffer {
  std::size_t struct_size;
  XlaExtension* extension;
  int dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

// Arguments or results; all of ours are buffers.
struct XlaBuffers {
  std::size_t struct_size;
  XlaExtension* extension;
  std::int64_t size;
  int* types;
  XlaBuffer** buffers;
};

struct XlaAttributes {
  std::size_t struct_size;
  XlaExtension* extension;
  std::int64_t size;
  int* types;
  XlaBytes** names;
  void** values;
};

struct XlaCallFrame {
  std::size_t struct_size;
  XlaExtension* extension;
  const XlaApi* api;
  XlaContext* context;
  int stage;
  XlaBuffers arguments;
  XlaBuffers results;
  XlaAttributes attributes;
  XlaFuture* future;  // set by a handler that ends later
};

using XlaHandler = XlaError*(XlaCallFrame*);

struct XlaMetadata {
  std::size_t struct_size;
  XlaVersion version;
  std::uint32_t traits;
  std::int64_t state_type;  // since 2.21
};

struct XlaMetadataExtension {
  XlaExtension base;
  XlaMetadata* metadata;
};

constexpr int kXlaMetadataExtension = 1;
constexpr int kXlaStringAttribute = 4;

struct XlaErrorCreate {
  std::size_t struct_size;
  XlaExtension* extension;
  const char* message;
  int code;
};

struct XlaErrorGetMessage {
  std::size_t struct_size;
  XlaExtension* extension;
  XlaError* error;
  const char* message;  // out
};

struct XlaErrorDestroy {
  std::size_t struct_size;
  XlaExtension* extension;
  XlaError* error;
};

struct XlaHandlerRegister {
  std::size_t struct_size;
  XlaExtension* extension;
  XlaBytes name;
  XlaBytes platform;
  XlaHandler* instantiate;
  XlaHandler* prepare;
  XlaHandler* initialize;
  XlaHandler* execute;
  std::uint32_t traits;
};

// One layout for three calls: creating a future (out), completing it, and failing it with `error`,
// which XLA then owns.
struct XlaFutureCall {
  std::size_t struct_size;
  XlaExtension* extension;
  XlaFuture* future;
  XlaError* error;
};

using XlaUnused = void();

struct XlaApi {
  std::size_t struct_size;
  XlaExtension* extension;
  XlaVersion version;
  const void* internal;
  XlaError* (*error_create)(XlaErrorCreate*);
  void (*error_get_message)(XlaErrorGetMessage*);
  void (*error_destroy)(XlaErrorDestroy*);
  XlaError* (*handler_register)(XlaHandlerRegister*);
  // Streams, types, contexts, states (2), memory (2), threads (2).
  XlaUnused* unused[9];
  XlaError* (*future_create)(XlaFutureCall*);
  XlaError* (*future_set_available)(XlaFutureCall*);
  XlaError* (*future_set_error)(XlaFutureCall*);
};

// Null when the TensorFlow in this process has no such interface, or an older one.
const XlaApi* FindXlaApi();

// From XLA's number of an element type to ours. False: we have no such type.
bool DTypeFromXla(int xla_dtype, DType* dtype);

}  // namespace keras_ring

#endif  // KERAS_RING_OPS_XLA_API_H_
