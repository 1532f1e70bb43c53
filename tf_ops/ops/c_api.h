// What Python calls through ctypes (keras_ring/native.py mirrors it). No exception passes;
// functions that can fail return the number of a Code and write a message.
#ifndef KERAS_RING_OPS_C_API_H_
#define KERAS_RING_OPS_C_API_H_

#include <stdint.h>

#define KERAS_RING_EXPORT __attribute__((visibility("default")))

extern "C" {

typedef struct {
  double stall_s;
  double stall_error_s;
  int64_t segment_bytes;
  int64_t bucket_bytes;
  int64_t known_requests;
  int64_t slot_bytes;
  int64_t algorithm;     // see core/algorithm.h
  const char* timeline;  // a folder; empty: no timelines
} keras_ring_options;

typedef struct {
  int32_t rank;
  int32_t size;
  int32_t local_rank;
  int32_t local_size;
  int32_t node_rank;
  int32_t num_nodes;
} keras_ring_place;

// Where the ranks of a process set speak: in an MPI communicator, given by its Fortran handle, or,
// with `use_mpi` zero, in this process, which is the only one.
typedef struct {
  int64_t use_mpi;
  int64_t fortran_comm;
  const int32_t* numbers;  // what messages call its ranks
  int64_t size;
} keras_ring_members;

// Starts the generation of a process set, 0 being the world. Blocks until all of its ranks have
// called it.
KERAS_RING_EXPORT int keras_ring_start(int process_set, const keras_ring_members* members,
                                       const keras_ring_options* options, keras_ring_place* place,
                                       char* message, int64_t message_bytes);

// Leaves a process set in agreement with its others (see Engine::Stop); kPeerLost when the
// generation had failed. Without a generation it does nothing.
KERAS_RING_EXPORT int keras_ring_stop(int process_set);

// Leaves all process sets at once; the others' collectives fail with `reason`.
KERAS_RING_EXPORT void keras_ring_abandon(const char* reason);

// Writes timelines of all process sets into a folder from now on; until then or the end.
KERAS_RING_EXPORT int keras_ring_start_timeline(const char* folder, char* message,
                                                int64_t message_bytes);
KERAS_RING_EXPORT void keras_ring_stop_timeline(void);

// Ends the process with status 1, without MPI_Finalize, which would wait for ranks that are gone.
// To be registered with Py_AtExit when a script has failed: Python has flushed and closed by then.
KERAS_RING_EXPORT void keras_ring_end_failed_process(void);

KERAS_RING_EXPORT const char* keras_ring_running_mpi(void);
KERAS_RING_EXPORT const char* keras_ring_compiled_mpi(void);
}

#endif  // KERAS_RING_OPS_C_API_H_
