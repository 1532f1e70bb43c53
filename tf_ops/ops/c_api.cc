#include "ops/c_api.h"

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "ops/process.h"
#include "transport/inprocess.h"
#include "transport/mpi_transport.h"

namespace keras_ring {
namespace {

struct Process {
  std::mutex mutex;
  std::map<int, std::shared_ptr<Engine>> engines;  // by process set; guarded by mutex
  int num_worlds = 0;                              // started so far; guarded by mutex
  pid_t pid = 0;  // of the process that started the engines; guarded by mutex
  // Engines of failed generations: the network may still write to what their requests point to, so
  // they are kept until the process ends. Guarded by mutex.
  std::vector<std::shared_ptr<Engine>> failed;
  InprocessHub alone{Topology::OneHost(1)};
};

// Never destroyed: threads of TensorFlow may outlive static destructors.
Process& TheProcess() {
  static auto* process = new Process;
  return *process;
}

// Takes an engine away from whoever would submit from now on.
std::shared_ptr<Engine> TakeEngine(int process_set) {
  Process& process = TheProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  if (process.pid != getpid()) return nullptr;
  const auto found = process.engines.find(process_set);
  if (found == process.engines.end()) return nullptr;
  std::shared_ptr<Engine> engine = std::move(found->second);
  process.engines.erase(found);
  return engine;
}

// Which world of this process it is, or belongs to.
int GenerationOf(int process_set) {
  Process& process = TheProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  if (process_set == kWorld) ++process.num_worlds;
  return process.num_worlds;
}

std::vector<std::shared_ptr<Engine>> Engines() {
  Process& process = TheProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  std::vector<std::shared_ptr<Engine>> engines;
  if (process.pid != getpid()) return engines;
  for (const auto& [process_set, engine] : process.engines) engines.push_back(engine);
  return engines;
}

std::vector<int> ProcessSets() {
  Process& process = TheProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  std::vector<int> sets;
  for (const auto& [process_set, engine] : process.engines) sets.push_back(process_set);
  return sets;
}

void Bury(std::shared_ptr<Engine> engine) {
  Process& process = TheProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  process.failed.push_back(std::move(engine));
}

int Report(const Status& status, char* message, int64_t message_bytes) {
  std::snprintf(message, message_bytes, "%s", status.message.c_str());
  return static_cast<int>(status.code);
}

std::shared_ptr<Engine> MakeEngine(const keras_ring_members& members, const Options& options) {
  const std::vector<int> numbers(members.numbers, members.numbers + members.size);
  auto transport = members.use_mpi != 0
                       ? ConnectMpi(static_cast<int>(members.fortran_comm), options.stall_error_s,
                                    options.slot_bytes, numbers)
                       : TheProcess().alone.Connect(0);
  return std::make_shared<Engine>(std::move(transport), options);
}

// The engine of a process set, or why there is none.
Status CurrentEngine(int process_set, std::shared_ptr<Engine>* engine) {
  Process& process = TheProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  const auto world = process.engines.find(kWorld);
  if (world == process.engines.end()) {
    return {Code::kInvalid, "keras_ring is not initialised; call keras_ring.init() first."};
  }
  if (process.pid != getpid()) {
    return {Code::kInvalid,
            "this process was forked from rank " + std::to_string(world->second->rank()) +
                " after keras_ring.init(). Collectives belong to the rank itself; start helpers "
                "with the 'spawn' method, or fork them before init()."};
  }
  const auto found = process.engines.find(process_set);
  if (found == process.engines.end()) {
    return {Code::kInvalid,
            "its process set has been removed, or belongs to a world before shutdown. Trace the "
            "function anew with a process set that has been added."};
  }
  *engine = found->second;
  return {};
}

}  // namespace

void Submit(int process_set, Request request) {
  std::shared_ptr<Engine> engine;
  Status status = CurrentEngine(process_set, &engine);
  if (status.ok()) return engine->Submit(std::move(request));
  status.message = std::string(KindName(request.signature.kind)) + " '" + LabelOf(request.name) +
                   "': " + status.message;
  request.done(status);
}

}  // namespace keras_ring

using keras_ring::Code;

int keras_ring_start(int process_set, const keras_ring_members* members,
                     const keras_ring_options* options, keras_ring_place* place, char* message,
                     int64_t message_bytes) {
  auto& process = keras_ring::TheProcess();
  keras_ring::Options given;
  given.stall_s = options->stall_s;
  given.stall_error_s = options->stall_error_s;
  given.segment_bytes = options->segment_bytes;
  given.bucket_bytes = options->bucket_bytes;
  given.known_requests = options->known_requests;
  given.slot_bytes = options->slot_bytes;
  given.timeline = options->timeline;
  given.process_set = process_set;
  given.generation = keras_ring::GenerationOf(process_set);
  given.algorithm = static_cast<keras_ring::Algorithm>(options->algorithm);
  try {
    auto engine = keras_ring::MakeEngine(*members, given);
    const keras_ring::Topology& topology = engine->topology();
    place->rank = engine->rank();
    place->size = topology.size();
    place->local_rank = topology.local_rank(place->rank);
    place->local_size = topology.local_size(place->rank);
    place->node_rank = topology.node_of[place->rank];
    place->num_nodes = topology.num_nodes();
    const std::lock_guard<std::mutex> lock(process.mutex);
    if (process.pid != getpid()) {
      // What was started before a fork is the parent's; its threads are not here to be joined.
      for (auto& [number, theirs] : process.engines) process.failed.push_back(std::move(theirs));
      process.engines.clear();
    }
    process.engines[process_set] = std::move(engine);
    process.pid = getpid();
    return static_cast<int>(Code::kOk);
  } catch (const keras_ring::Error& error) {
    return keras_ring::Report(error.status(), message, message_bytes);
  } catch (const std::exception& error) {
    return keras_ring::Report({Code::kInternal, error.what()}, message, message_bytes);
  }
}

int keras_ring_stop(int process_set) {
  auto engine = keras_ring::TakeEngine(process_set);
  if (engine == nullptr || engine->Stop()) return static_cast<int>(Code::kOk);
  keras_ring::Bury(std::move(engine));
  return static_cast<int>(Code::kPeerLost);
}

void keras_ring_abandon(const char* reason) {
  for (const int process_set : keras_ring::ProcessSets()) {
    auto engine = keras_ring::TakeEngine(process_set);
    if (engine == nullptr) continue;
    engine->Abandon(reason);
    keras_ring::Bury(std::move(engine));
  }
}

int keras_ring_start_timeline(const char* folder, char* message, int64_t message_bytes) {
  try {
    for (const auto& engine : keras_ring::Engines()) engine->StartTimeline(folder);
    return static_cast<int>(Code::kOk);
  } catch (const keras_ring::Error& error) {
    return keras_ring::Report(error.status(), message, message_bytes);
  }
}

void keras_ring_stop_timeline(void) {
  for (const auto& engine : keras_ring::Engines()) engine->StopTimeline();
}

void keras_ring_end_failed_process(void) {
  std::fflush(nullptr);
  _exit(1);
}

const char* keras_ring_running_mpi(void) {
  static const auto* text = new std::string(keras_ring::RunningMpi());
  return text->c_str();
}

const char* keras_ring_compiled_mpi(void) {
  static const auto* text = new std::string(keras_ring::CompiledMpi());
  return text->c_str();
}
