#include "engine/readiness.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

namespace keras_ring {
namespace {

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

}  // namespace

Readiness::Readiness(int rank, const Topology& topology, const Options& options)
    : rank_(rank),
      topology_(topology),
      options_(options),
      place_(AgreementTree(topology)[rank]),
      known_(options.known_requests) {
  const std::vector<TreePlace> places = AgreementTree(topology);
  for (const int child : place_.children) {
    auto& below = ranks_below_[child];
    below.push_back(child);
    for (std::size_t i = 0; i < below.size(); ++i) {
      const auto& children = places[below[i]].children;
      below.insert(below.end(), children.begin(), children.end());
    }
    seen_by_[child] = 0;
  }
}

std::string Readiness::Join(const std::vector<std::int32_t>& ranks) const {
  constexpr std::size_t kMost = 16;
  std::string text;
  for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(topology_.number_of[ranks[i]]);
  }
  if (ranks.size() > kMost) text += " and " + std::to_string(ranks.size() - kMost) + " more";
  return text;
}

std::string Readiness::Who(const std::vector<std::int32_t>& ranks) const {
  return (ranks.size() == 1 ? "rank " : "ranks ") + Join(ranks) +
         (ranks.size() == 1 ? " has " : " have ");
}

Readiness::Waiting* Readiness::Find(const std::string& name, double since_s) {
  Waiting& waiting = waiting_[KeyOf(name)];
  if (waiting.groups.empty()) waiting.since_s = since_s;
  // Not every rank gives a label.
  if (waiting.name.size() < name.size()) waiting.name = name;
  waiting.since_s = std::min(waiting.since_s, since_s);
  return &waiting;
}

void Readiness::Add(Waiting* waiting, Group group, int num_ranks) {
  const auto merge = [](std::vector<Group>* groups, const Group& more) {
    const auto same = std::find_if(groups->begin(), groups->end(), [&more](const Group& other) {
      return other.signature == more.signature || *other.signature == *more.signature;
    });
    if (same == groups->end()) return groups->push_back(more);
    same->ranks.insert(same->ranks.end(), more.ranks.begin(), more.ranks.end());
    same->whole_children.insert(same->whole_children.end(), more.whole_children.begin(),
                                more.whole_children.end());
  };
  merge(&waiting->groups, group);
  if (place_.parent >= 0) merge(&waiting->untold, group);
  waiting->num_ready += num_ranks;
  LookWhetherComplete(waiting);
}

void Readiness::LookWhetherComplete(Waiting* waiting) {
  if (waiting->is_complete) return;
  int num_ready = waiting->num_ready;
  if (!joined_.empty()) num_ready += static_cast<int>(AbsentOf(*waiting).size());
  if (num_ready < place_.subtree_size) return;
  waiting->is_complete = true;
  complete_.push_back(KeyOf(waiting->name));
}

void Readiness::AddJoined(std::int32_t rank) {
  if (std::find(joined_.begin(), joined_.end(), rank) != joined_.end()) return;
  joined_.push_back(rank);
  if (place_.parent >= 0) untold_joined_.push_back(rank);
  for (auto& [key, waiting] : waiting_) LookWhetherComplete(&waiting);
}

bool Readiness::has_joined() const {
  return std::find(joined_.begin(), joined_.end(), rank_) != joined_.end();
}

std::vector<std::int32_t> Readiness::CallersOf(const Waiting& waiting) const {
  std::vector<std::int32_t> callers;
  for (const Group& group : waiting.groups) {
    const auto ranks = RanksOf(group);
    callers.insert(callers.end(), ranks.begin(), ranks.end());
  }
  std::sort(callers.begin(), callers.end());
  return callers;
}

std::vector<std::int32_t> Readiness::AbsentOf(const Waiting& waiting) const {
  const auto callers = CallersOf(waiting);
  std::vector<std::int32_t> absent;
  for (const std::int32_t rank : joined_) {
    if (!std::binary_search(callers.begin(), callers.end(), rank)) absent.push_back(rank);
  }
  std::sort(absent.begin(), absent.end());
  return absent;
}

Status Readiness::RefusalForJoined(const Waiting& waiting) const {
  if (joined_.empty()) return {};
  const Signature& signature = *waiting.groups.front().signature;
  const auto absent = AbsentOf(waiting);
  const std::int32_t root = topology_.rank_of(signature.root);
  const bool is_root_absent = std::binary_search(absent.begin(), absent.end(), root);
  const bool gives_parts =
      signature.kind == Kind::kAlltoall || signature.kind == Kind::kReducescatter;
  const char* why = nullptr;
  if (gives_parts && !absent.empty()) why = "what it is to get would be lost";
  // A caller that XLA has compiled.
  const bool has_fixed_rows = signature.kind == Kind::kAllgather && !signature.shapes.empty() &&
                              signature.shapes[0][0] >= 0;
  if (has_fixed_rows && !absent.empty()) why = "XLA has made room for rows of every rank";
  const bool is_broadcast = signature.kind == Kind::kBroadcast;
  if (is_broadcast && is_root_absent) why = "nobody else has its value";
  if (why == nullptr) return {};
  return {Code::kInvalid, std::string(KindName(signature.kind)) + " '" + LabelOf(waiting.name) +
                              "': " + Who(is_broadcast ? std::vector<std::int32_t>{root} : absent) +
                              "joined, and " + why +
                              ". Call join after the last such call of any rank."};
}

void Readiness::AddOwn(const std::string& name, const Signature& signature, double since_s) {
  Group group;
  const auto number = known_.Find(KeyOf(name), signature);
  group.signature =
      number ? known_.Get(*number)->signature : std::make_shared<const Signature>(signature);
  group.ranks.push_back(rank_);
  Add(Find(name, since_s), std::move(group), 1);
  if (signature.kind == Kind::kJoin) AddJoined(rank_);
}

void Readiness::AddDeparture(const Departure& departure) { departures_.push_back(departure); }

void Readiness::AddFromChild(int child, const Upward& message, double now_s) {
  departures_.insert(departures_.end(), message.departures.begin(), message.departures.end());
  seen_by_[child] = std::max(seen_by_[child], message.seen);
  if (message.epoch != epoch_) return;
  for (const std::int32_t rank : message.joined) AddJoined(rank);
  for (const std::uint32_t number : message.known) {
    const Known::Entry* entry = known_.Get(number);
    if (entry == nullptr) {
      throw Error(Code::kInternal,
                  topology_.describe[child] + " named a request by an unknown number");
    }
    Group group;
    group.signature = entry->signature;
    group.whole_children.push_back(child);
    Add(Find(entry->name, now_s), std::move(group), static_cast<int>(ranks_below_[child].size()));
  }
  for (const NamedReadiness& named : message.named) {
    for (const Callers& callers : named.callers) {
      Group group;
      group.signature = std::make_shared<const Signature>(callers.signature);
      group.ranks = callers.ranks;
      Add(Find(named.name, now_s - named.waited_s), std::move(group),
          static_cast<int>(callers.ranks.size()));
    }
  }
}

std::vector<std::int32_t> Readiness::RanksOf(const Group& group) const {
  std::vector<std::int32_t> ranks = group.ranks;
  for (const int child : group.whole_children) {
    const auto& below = ranks_below_.at(child);
    ranks.insert(ranks.end(), below.begin(), below.end());
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

NamedReadiness Readiness::Tell(Waiting* waiting, double now_s) const {
  NamedReadiness named;
  named.name = waiting->name;
  named.waited_s = now_s - waiting->since_s;
  for (const Group& group : waiting->untold) {
    named.callers.push_back(Callers{*group.signature, RanksOf(group)});
  }
  waiting->untold.clear();
  waiting->was_told_in_part = true;
  return named;
}

std::optional<Upward> Readiness::TakeUpward(double now_s) {
  Upward message;
  message.epoch = epoch_;
  message.seen = sequence_;
  for (const std::string& key : complete_) {
    Waiting& waiting = waiting_[key];
    std::optional<std::uint32_t> number;
    // Told by number it would seem to the parent to have been called just now.
    const bool is_old = now_s - waiting.since_s >= options_.stall_s / 2;
    if (!waiting.was_told_in_part && !is_old && waiting.groups.size() == 1) {
      number = known_.Find(key, *waiting.groups.front().signature);
    }
    if (number) {
      message.known.push_back(*number);
      waiting.untold.clear();
    } else {
      message.named.push_back(Tell(&waiting, now_s));
    }
  }
  complete_.clear();
  if (now_s >= next_look_s_) {
    next_look_s_ = now_s + options_.stall_s / 8;
    for (auto& [key, waiting] : waiting_) {
      if (!waiting.untold.empty() && now_s - waiting.since_s >= options_.stall_s / 2) {
        message.named.push_back(Tell(&waiting, now_s));
      }
    }
  }
  message.joined = std::exchange(untold_joined_, {});
  message.departures = std::exchange(departures_, {});
  if (message.known.empty() && message.named.empty() && message.joined.empty() &&
      message.departures.empty()) {
    return std::nullopt;
  }
  return message;
}

std::optional<Publication> Readiness::TakePublication(bool may_agree, double now_s) {
  Publication publication;
  std::vector<std::string> later;
  for (const std::string& key : complete_) {
    const Waiting& waiting = waiting_[key];
    if (waiting.groups.size() > 1 || !waiting.groups.front().signature->problem.empty()) {
      publication.refused.push_back(Refused{key, Disagreement(waiting)});
    } else if (const Status refusal = RefusalForJoined(waiting); !refusal.ok()) {
      publication.refused.push_back(Refused{key, refusal});
    } else if (!may_agree || has_departures_) {
      later.push_back(key);
    } else if (const auto number = known_.Find(key, *waiting.groups.front().signature)) {
      Agreed agreed;
      agreed.is_known = true;
      agreed.number = *number;
      publication.agreed.push_back(std::move(agreed));
    } else {
      Agreed agreed;
      agreed.key = key;
      agreed.has_call = !joined_.empty();
      if (agreed.has_call) {
        agreed.name = waiting.name;
        agreed.signature = *waiting.groups.front().signature;
      }
      publication.agreed.push_back(std::move(agreed));
    }
  }
  if (!publication.agreed.empty()) {
    last_agreed_s_ = now_s;
    if (!joined_.empty()) publication.last_joined = joined_.back();
  }
  complete_ = std::move(later);
  if (now_s >= next_look_s_) {
    next_look_s_ = now_s + options_.stall_s / 8;
    for (auto& [key, waiting] : waiting_) {
      if (waiting.is_complete) continue;
      // A join waits for as long as the others go on.
      const bool is_join = waiting.groups.front().signature->kind == Kind::kJoin;
      const double waited_s =
          now_s - (is_join ? std::max(waiting.since_s, last_agreed_s_) : waiting.since_s);
      if (options_.stall_error_s > 0 && waited_s >= options_.stall_error_s) {
        publication.refused.push_back(
            Refused{key, Status{Code::kTimeout, Stall(waiting, now_s, /*is_error=*/true)}});
      } else if (waited_s >= options_.stall_s && !waiting.was_reported) {
        waiting.was_reported = true;
        publication.reports.push_back(Stall(waiting, now_s, /*is_error=*/false));
      }
    }
  }
  publication.departures = std::exchange(departures_, {});
  has_departures_ = has_departures_ || !publication.departures.empty();
  if (publication.agreed.empty() && publication.refused.empty() && publication.reports.empty() &&
      publication.departures.empty()) {
    return std::nullopt;
  }
  publication.sequence = sequence_ + 1;
  return publication;
}

std::vector<Readiness::Ready> Readiness::Apply(const Publication& publication) {
  sequence_ = publication.sequence;
  std::vector<Ready> all_ready;
  for (const Agreed& agreed : publication.agreed) {
    Ready ready;
    if (agreed.is_known) {
      known_.Touch(agreed.number);
      const Known::Entry& entry = *known_.Get(agreed.number);
      ready = {entry.key, entry.name, entry.signature};
    } else {
      const auto found = waiting_.find(agreed.key);
      if (found != waiting_.end()) {
        ready = {agreed.key, found->second.name, found->second.groups.front().signature};
      } else if (agreed.has_call) {
        ready = {agreed.key, agreed.name, std::make_shared<const Signature>(agreed.signature)};
      } else {
        throw Error(Code::kInternal, "the ranks agreed on '" + agreed.key + "', which " +
                                         topology_.describe[rank_] + " has not called");
      }
      known_.Add(ready.name, ready.signature, sequence_);
    }
    waiting_.erase(ready.key);
    if (ready.signature->kind == Kind::kJoin) {
      joined_.clear();
      untold_joined_.clear();
    }
    all_ready.push_back(std::move(ready));
  }
  std::uint64_t seen = sequence_;
  for (const auto& [child, child_seen] : seen_by_) seen = std::min(seen, child_seen);
  known_.ForgetRetired(seen);
  if (!publication.refused.empty()) {
    ++epoch_;
    waiting_.clear();
    complete_.clear();
    joined_.clear();
    untold_joined_.clear();
  }
  return all_ready;
}

Status Readiness::Disagreement(const Waiting& waiting) const {
  // The two largest camps are what a person compares first.
  std::vector<const Group*> camps;
  for (const Group& group : waiting.groups) camps.push_back(&group);
  std::stable_sort(camps.begin(), camps.end(), [this](const Group* a, const Group* b) {
    return RanksOf(*a).front() < RanksOf(*b).front();
  });
  const Signature& first = *camps.front()->signature;
  std::string problems;
  for (const Group* const camp : camps) {
    if (camp->signature->problem.empty()) continue;
    problems += std::string(problems.empty() ? "" : "; ") + Who(RanksOf(*camp)) +
                "called it wrongly: its " + camp->signature->problem;
  }
  const std::string who = std::string(KindName(first.kind)) + " '" + LabelOf(waiting.name) + "': ";
  if (!problems.empty()) return Status{Code::kInvalid, who + problems};
  std::string text;
  std::string what;
  for (std::size_t i = 1; i < camps.size(); ++i) {
    const Difference difference = Differ(first, *camps[i]->signature, waiting.name);
    if (i == 1) {
      what = difference.what;
      text = Who(RanksOf(*camps.front())) + difference.first;
    }
    text += ", " + Who(RanksOf(*camps[i])) +
            (difference.what == what ? "" : difference.what + " ") + difference.second;
  }
  return Status{Code::kMismatch,
                who + "ranks disagree on " + what + ": " + text +
                    ". Build the same model and make the same calls on every rank."};
}

std::string Readiness::Stall(const Waiting& waiting, double now_s, bool is_error) const {
  const auto callers = CallersOf(waiting);
  const auto absent = AbsentOf(waiting);
  std::vector<std::int32_t> missing;
  for (std::int32_t rank = 0; rank < topology_.size(); ++rank) {
    if (!std::binary_search(callers.begin(), callers.end(), rank) &&
        !std::binary_search(absent.begin(), absent.end(), rank)) {
      missing.push_back(rank);
    }
  }
  const std::string knob =
      is_error ? "KERAS_RING_STALL_ERROR_S (now " + Seconds(options_.stall_error_s) + "; 0: never)"
               : "KERAS_RING_STALL_S (now " + Seconds(options_.stall_s) + ")";
  return std::string(KindName(waiting.groups.front().signature->kind)) + " '" +
         LabelOf(waiting.name) + "' has waited " + Seconds(now_s - waiting.since_s) +
         "; missing ranks: " + Join(missing) + "; ranks that called it: " + Join(callers) +
         ". The missing ranks have not called it; look for branches that depend on the rank, or "
         "raise " +
         knob + ".";
}

}  // namespace keras_ring
