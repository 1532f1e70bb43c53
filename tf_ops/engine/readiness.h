// When may a request run? One rank's part of that agreement: a place in the tree, a table of what
// is ready below, what to tell the parent, and, at the root, what to publish. A state machine
// without thread, clock or wire, so that every course of events can be tested.
//
// A rank tells its parent once its whole subtree is ready, which for a known request is one bit.
// The root publishes what all ranks have called; everybody takes publications in, in order. When
// ranks disagree the root publishes a refusal: all forget what was ready, count an epoch further
// and tell what is still waiting anew, for some ranks' requests may have ended with the refused
// one.
//
// A rank that has called join counts as ready for everything until all have; every rank above it in
// the tree knows of it. It runs what the others agree on without having called it.
#ifndef KERAS_RING_ENGINE_READINESS_H_
#define KERAS_RING_ENGINE_READINESS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/options.h"
#include "engine/known.h"
#include "engine/messages.h"
#include "engine/request.h"
#include "transport/topology.h"

namespace keras_ring {

class Readiness {
 public:
  Readiness(int rank, const Topology& topology, const Options& options);

  // This rank has called `name` at `since_s`; not again before the name was published. The time is
  // that of any clock that only this rank reads.
  void AddOwn(const std::string& name, const Signature& signature, double since_s);

  // This rank, or one below, will not call anything any more.
  void AddDeparture(const Departure& departure);

  void AddFromChild(int child, const Upward& message, double now_s);

  // For the parent, if there is anything new. Names that wait for long are told before they are
  // complete, so that the root can say who is missing.
  std::optional<Upward> TakeUpward(double now_s);

  // Root only: what all ranks shall do next, if there is anything. Without `may_agree` (the wire is
  // busy) nothing new is started, but refusals, reports and departures go out.
  std::optional<Publication> TakePublication(bool may_agree, double now_s);

  // What to run now, in order.
  struct Ready {
    std::string key;
    std::string name;
    std::shared_ptr<const Signature> signature;
  };
  // After a refusal the caller adds its waiting requests again.
  std::vector<Ready> Apply(const Publication& publication);

  // Whether this rank waits in a join.
  bool has_joined() const;

 private:
  // Ranks that called with one signature. Children whose whole subtree did are kept by the child.
  struct Group {
    std::shared_ptr<const Signature> signature;
    std::vector<std::int32_t> ranks;
    std::vector<int> whole_children;
  };
  struct Waiting {
    std::string name;
    std::vector<Group> groups;
    std::vector<Group> untold;  // the part that the parent has not been told
    bool was_told_in_part = false;
    bool is_complete = false;  // all ranks of the subtree are ready
    int num_ready = 0;         // ranks that have called
    double since_s = 0;
    bool was_reported = false;
  };

  Waiting* Find(const std::string& name, double since_s);
  void Add(Waiting* waiting, Group group, int num_ranks);
  void AddJoined(std::int32_t rank);
  // Notes when all ranks of the subtree have called or joined.
  void LookWhetherComplete(Waiting* waiting);
  std::vector<std::int32_t> CallersOf(const Waiting& waiting) const;
  // Ranks below that have joined and not called.
  std::vector<std::int32_t> AbsentOf(const Waiting& waiting) const;
  // Why it cannot run without those that have joined.
  Status RefusalForJoined(const Waiting& waiting) const;
  std::vector<std::int32_t> RanksOf(const Group& group) const;
  NamedReadiness Tell(Waiting* waiting, double now_s) const;
  // A rank list for a sentence: "0, 2, 5", cut where nobody reads on; and "ranks 0, 2, 5 have ".
  std::string Join(const std::vector<std::int32_t>& ranks) const;
  std::string Who(const std::vector<std::int32_t>& ranks) const;
  Status Disagreement(const Waiting& waiting) const;
  // "has waited 60 s; ranks 0, 1 have called it, missing: rank 2 (host b, pid 812). …"
  std::string Stall(const Waiting& waiting, double now_s, bool is_error) const;

  const int rank_;
  const Topology topology_;
  const Options options_;
  const TreePlace place_;
  std::map<int, std::vector<std::int32_t>> ranks_below_;  // of each child's subtree
  std::map<int, std::uint64_t> seen_by_;                  // last publication that a child took in

  Known known_;
  std::unordered_map<std::string, Waiting> waiting_;  // by key
  std::vector<std::string> complete_;                 // keys ready on the subtree and not yet told
  std::vector<std::int32_t> joined_;                  // ranks of the subtree, as they came
  std::vector<std::int32_t> untold_joined_;
  double last_agreed_s_ = 0;           // root: something ran
  std::vector<Departure> departures_;  // not yet told
  bool has_departures_ = false;
  std::uint32_t epoch_ = 0;
  std::uint64_t sequence_ = 0;
  double next_look_s_ = 0;  // for names that wait for long
};

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_READINESS_H_
