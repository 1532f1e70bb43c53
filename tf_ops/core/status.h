// Error codes, one per cause, and the two forms in which they travel: `Error` is thrown inside the
// library, `Status` is handed to whoever waits for a request. Translated to TensorFlow in ops/.
#ifndef KERAS_RING_CORE_STATUS_H_
#define KERAS_RING_CORE_STATUS_H_

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace keras_ring {

// The numbers are part of the control messages and of the C API.
enum class Code : std::uint8_t {
  kOk = 0,
  kInvalid = 1,   // the caller, this rank
  kMismatch = 2,  // ranks disagree
  kPeerLost = 3,  // a peer died or left
  kTimeout = 4,   // a peer did not come
  kInternal = 5,  // a bug of ours
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}

  Code code() const { return code_; }
  Status status() const { return Status{code_, what()}; }

 private:
  Code code_;
};

}  // namespace keras_ring

#endif  // KERAS_RING_CORE_STATUS_H_
