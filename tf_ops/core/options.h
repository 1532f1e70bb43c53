// What the Python side decides and hands over at the start of a generation; C++ reads no
// environment variable.
#ifndef KERAS_RING_CORE_OPTIONS_H_
#define KERAS_RING_CORE_OPTIONS_H_

#include <cstdint>
#include <string>

#include "core/algorithm.h"

namespace keras_ring {

struct Options {
  // Seconds after which a collective that some ranks have not called is reported.
  double stall_s = 60.0;
  // Seconds after which it becomes an error on the ranks that wait; 0: never.
  double stall_error_s = 600.0;
  // Elements of one message are at most this many bytes. 256 KiB keeps a segment, the one being
  // received and the partial result inside a 1 MiB L2 cache.
  std::int64_t segment_bytes = 256 * 1024;
  // Of the memory that the ranks of a host share: each has four slots of this size (between hosts
  // four times as much). 256 KiB windows of all ranks fit the second-level caches together.
  std::int64_t slot_bytes = 256 * 1024;
  // Requests are fused up to this many bytes; a larger tensor travels alone, unpacked.
  std::int64_t bucket_bytes = 64 * 1024 * 1024;
  // How many names the ranks know by number, so that a later request costs one bit.
  std::int64_t known_requests = 4096;
  // How allreduce runs; kAuto: see collectives/select.h.
  Algorithm algorithm = Algorithm::kAuto;
  // The folder of the ranks' timelines; empty: none are written.
  std::string timeline;
  // Which process set of this rank it is; tells the tracks of its timelines apart.
  int process_set = 0;
  // Counts the worlds of this process; each writes timelines of its own.
  int generation = 1;
};

}  // namespace keras_ring

#endif  // KERAS_RING_CORE_OPTIONS_H_
