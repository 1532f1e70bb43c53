#include "transport/mpi_transport.h"

#include <fcntl.h>
#include <mpi.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <list>
#include <utility>
#include <vector>

#include "core/log.h"
#include "core/status.h"
#include "transport/slots.h"

namespace keras_ring {
namespace {

constexpr int kDataTag = 1;
constexpr int kControlTag = 2;

// Below this a message between hosts is all latency.
constexpr std::size_t kLeastSegmentBytes = 16 * 1024;

// keras_ring/config.py states the limit: with messages and buffers a rank stays below 64 MiB.
constexpr std::size_t kMostArenaBytes = std::size_t{48} * 1024 * 1024;

std::string MpiErrorText(int error) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(error, text, &length) != MPI_SUCCESS) return std::to_string(error);
  return std::string(text, length);
}

void Check(int error, const char* call) {
  if (error == MPI_SUCCESS) return;
  // With fault tolerance MPI says that a process is gone; without, a broken connection comes as one
  // of many other codes. Either way the generation cannot go on.
  throw Error(Code::kPeerLost, std::string(call) + " failed: " + MpiErrorText(error));
}

// A file descriptor that becomes readable when the process ends; it holds on to this process, not
// to whoever gets its number next. -1 where the kernel (before 5.3) has none.
int OpenPidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

// Tells PID namespaces apart: a process id means nothing in another one.
std::uint64_t PidNamespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

class Patience {
 public:
  Patience(double timeout_s, std::string what)
      : timeout_s_(timeout_s), what_(std::move(what)), start_(Clock::now()) {}

  // Waits for a request of MPI without burning the core: start-up is not a matter of microseconds.
  void Await(MPI_Request* request) {
    int is_done = 0;
    for (;;) {
      Check(MPI_Test(request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
      if (is_done != 0) return;
      const double waited_s = std::chrono::duration<double>(Clock::now() - start_).count();
      if (timeout_s_ > 0 && waited_s > timeout_s_) {
        char limit[32];
        std::snprintf(limit, sizeof limit, "%g", timeout_s_);
        throw Error(Code::kTimeout, what_ + " has waited " + limit +
                                        " s for the other ranks. Call keras_ring.init() on every "
                                        "rank, or raise KERAS_RING_STALL_ERROR_S.");
      }
      usleep(waited_s < 0.01 ? 50 : 1000);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  const double timeout_s_;
  const std::string what_;
  const Clock::time_point start_;
};

// What each rank tells the others about itself at the start.
struct Card {
  char host[128] = {};
  int pid = 0;
  std::uint64_t pid_namespace = 0;
};

class MpiTransport : public Transport {
 public:
  MpiTransport(MPI_Comm user_comm, double timeout_s, std::size_t slot_bytes,
               const std::vector<int>& numbers) {
    Patience patience(timeout_s, "init");
    MPI_Request request = MPI_REQUEST_NULL;
    Check(MPI_Comm_idup(user_comm, &comm_, &request), "MPI_Comm_idup");
    patience.Await(&request);
    Check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    int size = 0;
    Check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    Check(MPI_Comm_size(comm_, &size), "MPI_Comm_size");
    topology_.number_of = numbers;
    Introduce(size, slot_bytes, &patience);
  }

  ~MpiTransport() override {
    for (const pollfd& watched : watched_) {
      if (watched.fd >= 0) close(watched.fd);
    }
  }

  int rank() const override { return rank_; }
  const Topology& topology() const override { return topology_; }

  Transfer Send(int peer, const void* data, std::size_t bytes) override {
    MPI_Request request = MPI_REQUEST_NULL;
    Check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, peer, kDataTag, comm_, &request),
          "MPI_Isend");
    return transfers_.Add(request);
  }

  Transfer Recv(int peer, void* data, std::size_t bytes) override {
    MPI_Request request = MPI_REQUEST_NULL;
    Check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, peer, kDataTag, comm_, &request),
          "MPI_Irecv");
    return transfers_.Add(request);
  }

  bool Test(Transfer transfer) override {
    int is_done = 0;
    Check(MPI_Test(&transfers_[transfer], &is_done, MPI_STATUS_IGNORE), "MPI_Test");
    if (is_done != 0) transfers_.Remove(transfer);
    return is_done != 0;
  }

  void SendControl(int peer, std::string message) override {
    if (IsNear(peer)) return arena_->Send(topology_.local_rank(peer), std::move(message));
    ReapSentControl();
    sent_control_.emplace_back();
    auto& sent = sent_control_.back();
    sent.message = std::move(message);
    Check(MPI_Isend(sent.message.data(), static_cast<int>(sent.message.size()), MPI_BYTE, peer,
                    kControlTag, comm_, &sent.request),
          "MPI_Isend");
  }

  bool RecvControl(int* peer, std::string* message) override {
    int local_rank = 0;
    if (arena_ != nullptr && arena_->Recv(&local_rank, message)) {
      *peer = local_ranks_[local_rank];
      return true;
    }
    if (IsAllNear()) return false;
    AcceptControl();
    if (arriving_.empty()) return false;
    int is_done = 0;
    Check(MPI_Test(&arriving_.front().request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
    if (is_done == 0) return false;
    *peer = arriving_.front().peer;
    *message = std::move(arriving_.front().message);
    arriving_.pop_front();
    return true;
  }

  bool HasUnsentControl() override {
    ReapSentControl();
    return !sent_control_.empty() || (arena_ != nullptr && arena_->HasUnsent());
  }

  int FindLostPeer() override {
    if (watched_.empty() || poll(watched_.data(), watched_.size(), 0) <= 0) return -1;
    for (std::size_t i = 0; i < watched_.size(); ++i) {
      if ((watched_[i].revents & POLLIN) != 0) return watched_ranks_[i];
    }
    return -1;
  }

  Bell* bell() override {
    return arena_ != nullptr ? arena_->bell(arena_->local_rank()) : &own_bell_;
  }
  // Hosts speak through their leaders.
  bool MustPoll() const override {
    return arena_ == nullptr || (!IsAllNear() && arena_->local_rank() == 0);
  }
  Arena* arena() override { return arena_.get(); }

  void Close() override { MPI_Comm_free(&comm_); }

 private:
  bool IsNear(int peer) const {
    return arena_ != nullptr && topology_.node_of[peer] == topology_.node_of[rank_];
  }
  bool IsAllNear() const { return arena_ != nullptr && arena_->local_size() == size(); }

  struct Control {
    int peer = -1;
    std::string message;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  // Learns every rank's host and process and starts to watch those of this host.
  void Introduce(int size, std::size_t slot_bytes, Patience* patience) {
    Card own;
    gethostname(own.host, sizeof own.host - 1);
    own.pid = getpid();
    own.pid_namespace = PidNamespace();
    std::vector<Card> cards(size);
    MPI_Request request = MPI_REQUEST_NULL;
    Check(MPI_Iallgather(&own, sizeof own, MPI_BYTE, cards.data(), sizeof own, MPI_BYTE, comm_,
                         &request),
          "MPI_Iallgather");
    patience->Await(&request);
    // Ranks that can share memory are one host, whatever it calls itself.
    MPI_Comm host_comm = MPI_COMM_NULL;
    Check(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &host_comm),
          "MPI_Comm_split_type");
    int lowest = rank_;
    Check(MPI_Bcast(&lowest, 1, MPI_INT, 0, host_comm), "MPI_Bcast");
    // Between hosts a window makes a round of its own, with a segment for each rank of the world.
    int local_size = 0;
    MPI_Comm_size(host_comm, &local_size);
    int num_slots = Arena::kNumSlots;
    if (local_size < size) {
      num_slots = Arena::kNumSlotsBetweenHosts;
      // What the number of ranks asks for stays within the limit that config.py states.
      const std::size_t for_ranks =
          std::min(kLeastSegmentBytes * size, kMostArenaBytes / num_slots);
      slot_bytes = std::max(4 * slot_bytes, for_ranks);
    }
    std::string obstacle;
    if (cards[lowest].pid_namespace != own.pid_namespace) {
      obstacle = "it lives in another PID namespace than rank " +
                 std::to_string(topology_.number_of[lowest]);
    }
    std::shared_ptr<void> memory = ShareMemory(host_comm, slot_bytes, num_slots, &obstacle);
    MPI_Comm_free(&host_comm);
    std::vector<int> lowest_of(size);
    Check(MPI_Iallgather(&lowest, 1, MPI_INT, lowest_of.data(), 1, MPI_INT, comm_, &request),
          "MPI_Iallgather");
    patience->Await(&request);
    std::vector<int> node_of_lowest(size, -1);
    int num_nodes = 0;
    for (int rank = 0; rank < size; ++rank) {
      int& node = node_of_lowest[lowest_of[rank]];
      if (node < 0) node = num_nodes++;
      topology_.node_of.push_back(node);
      topology_.describe.push_back("rank " + std::to_string(topology_.number_of[rank]) + " (host " +
                                   cards[rank].host + ", pid " + std::to_string(cards[rank].pid) +
                                   ")");
    }
    if (!obstacle.empty()) {
      LogLine(topology_.number_of[rank_],
              "warning: " + topology_.describe[rank_] +
                  " cannot share memory with the "
                  "ranks of its host (" +
                  obstacle +
                  "). Collectives go through MPI, which is "
                  "right but several times slower. In containers, give the ranks of a host one "
                  "PID namespace and allow memfd_create.");
    }
    // One way of talking for all: without shared memory on one host, none on any.
    int has_memory = memory != nullptr ? 1 : 0;
    Check(MPI_Iallreduce(MPI_IN_PLACE, &has_memory, 1, MPI_INT, MPI_MIN, comm_, &request),
          "MPI_Iallreduce");
    patience->Await(&request);
    if (has_memory != 0) {
      void* const begin = memory.get();
      arena_ = std::make_unique<Arena>(begin, std::move(memory), topology_.local_rank(rank_),
                                       topology_.local_size(rank_), slot_bytes, num_slots);
    }
    for (int rank = 0; rank < size; ++rank) {
      if (topology_.node_of[rank] == topology_.node_of[rank_]) local_ranks_.push_back(rank);
    }
    for (int rank = 0; rank < size; ++rank) {
      if (rank == rank_ || lowest_of[rank] != lowest) continue;
      if (cards[rank].pid_namespace != own.pid_namespace) continue;
      const int fd = OpenPidfd(cards[rank].pid);
      if (fd < 0) continue;
      watched_.push_back(pollfd{fd, POLLIN, 0});
      watched_ranks_.push_back(rank);
    }
  }

  void ReapSentControl() {
    for (auto sent = sent_control_.begin(); sent != sent_control_.end();) {
      int is_done = 0;
      Check(MPI_Test(&sent->request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
      sent = is_done != 0 ? sent_control_.erase(sent) : std::next(sent);
    }
  }

  // Matches every control message that has arrived. A long one may still be on its way when it is
  // matched, so the receive is not waited for here.
  void AcceptControl() {
    for (;;) {
      int is_there = 0;
      MPI_Message matched = MPI_MESSAGE_NULL;
      MPI_Status status;
      Check(MPI_Improbe(MPI_ANY_SOURCE, kControlTag, comm_, &is_there, &matched, &status),
            "MPI_Improbe");
      if (is_there == 0) return;
      int bytes = 0;
      Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
      arriving_.emplace_back();
      Control& control = arriving_.back();
      control.peer = status.MPI_SOURCE;
      control.message.resize(bytes);
      Check(MPI_Imrecv(control.message.data(), bytes, MPI_BYTE, &matched, &control.request),
            "MPI_Imrecv");
    }
  }

  // Memory for the arena of this host, mapped by all of its ranks, or null on all of them. It has
  // no name: the leader makes it, the others open it through the leader's process, and nothing of
  // it outlives them. `obstacle`: what stands in this rank's way, or failed.
  static std::shared_ptr<void> ShareMemory(MPI_Comm host_comm, std::size_t slot_bytes,
                                           int num_slots, std::string* obstacle) {
    int local_rank = 0;
    int local_size = 0;
    MPI_Comm_rank(host_comm, &local_rank);
    MPI_Comm_size(host_comm, &local_size);
    const std::size_t bytes = Arena::Bytes(local_size, slot_bytes, num_slots);
    const auto fail = [obstacle](const std::string& what) {
      *obstacle = what + ": " + std::strerror(errno);
    };
    int where[2] = {getpid(), -1};
    if (local_rank == 0) {
      where[1] = memfd_create("keras_ring", MFD_CLOEXEC);
      if (where[1] < 0) {
        fail("memfd_create");
      } else if (ftruncate(where[1], static_cast<off_t>(bytes)) != 0) {
        fail("ftruncate to " + std::to_string(bytes) + " bytes");
        close(where[1]);
        where[1] = -1;
      }
    }
    int fd = where[1];
    Check(MPI_Bcast(where, 2, MPI_INT, 0, host_comm), "MPI_Bcast");
    if (local_rank > 0 && where[1] >= 0 && obstacle->empty()) {
      const std::string path =
          "/proc/" + std::to_string(where[0]) + "/fd/" + std::to_string(where[1]);
      fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (fd < 0) fail(path);
    }
    void* begin = MAP_FAILED;
    if (fd >= 0) {
      begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (begin == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes");
    }
    int is_mapped = begin != MAP_FAILED ? 1 : 0;
    Check(MPI_Allreduce(MPI_IN_PLACE, &is_mapped, 1, MPI_INT, MPI_MIN, host_comm), "MPI_Allreduce");
    if (fd >= 0) close(fd);
    if (begin == MAP_FAILED) return nullptr;
    std::shared_ptr<void> memory(begin, [bytes](void* at) { munmap(at, bytes); });
    return is_mapped != 0 ? memory : nullptr;
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  std::vector<int> local_ranks_;  // the ranks of this host
  std::unique_ptr<Arena> arena_;
  Bell own_bell_;  // where there is no arena
  Topology topology_;
  Slots<MPI_Request> transfers_;
  std::list<Control> sent_control_;
  std::deque<Control> arriving_;
  std::vector<pollfd> watched_;
  std::vector<int> watched_ranks_;  // parallel to watched_
};

}  // namespace

std::unique_ptr<Transport> ConnectMpi(int fortran_comm, double timeout_s, std::size_t slot_bytes,
                                      const std::vector<int>& numbers) {
  int is_initialized = 0;
  MPI_Initialized(&is_initialized);
  if (is_initialized == 0) throw Error(Code::kInvalid, "MPI is not initialised");
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) {
    throw Error(Code::kInvalid,
                "MPI was initialised with a thread level below MPI_THREAD_MULTIPLE, but the engine "
                "has a thread of its own. Let keras_ring.init() initialise MPI, or initialise it "
                "with MPI_THREAD_MULTIPLE.");
  }
  return std::make_unique<MpiTransport>(MPI_Comm_f2c(fortran_comm), timeout_s, slot_bytes, numbers);
}

std::string RunningMpi() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string whole(text, length);
  return whole.substr(0, whole.find_first_of(",\n"));
}

std::string CompiledMpi() {
#if defined(OMPI_MAJOR_VERSION)
  return "Open MPI " + std::to_string(OMPI_MAJOR_VERSION) + "." +
         std::to_string(OMPI_MINOR_VERSION) + "." + std::to_string(OMPI_RELEASE_VERSION);
#elif defined(MPICH_VERSION)
  return "MPICH " MPICH_VERSION;
#else
  return "MPI " + std::to_string(MPI_VERSION) + "." + std::to_string(MPI_SUBVERSION);
#endif
}

}  // namespace keras_ring
