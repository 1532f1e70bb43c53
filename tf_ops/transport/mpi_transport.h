// The transport over MPI point to point, which brings shared memory, TCP and RDMA. The only user of
// mpi.h is its .cc file; communicators come as Fortran handles, an int in every MPI.
#ifndef KERAS_RING_TRANSPORT_MPI_TRANSPORT_H_
#define KERAS_RING_TRANSPORT_MPI_TRANSPORT_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace keras_ring {

// Duplicates the communicator with the Fortran handle `fortran_comm`; the caller's own is never
// used for a message. MPI must be initialised with MPI_THREAD_MULTIPLE. Every rank of the
// communicator calls this; throws Error(kTimeout) when some have not after `timeout_s` seconds
// (0: never). `slot_bytes`: of the arena that the ranks of a host share. `numbers`: what messages
// call its ranks; those of a part of the job have numbers of their own there.
std::unique_ptr<Transport> ConnectMpi(int fortran_comm, double timeout_s, std::size_t slot_bytes,
                                      const std::vector<int>& numbers);

// The MPI in this process, and the one that this library was compiled with, e.g.
// "Open MPI v5.0.11" and "Open MPI 5.0.11".
std::string RunningMpi();
std::string CompiledMpi();

}  // namespace keras_ring

#endif  // KERAS_RING_TRANSPORT_MPI_TRANSPORT_H_
