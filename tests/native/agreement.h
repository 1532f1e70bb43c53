// The agreement of all ranks without engine, thread or clock: tests decide which message travels
// when.
#ifndef KERAS_RING_TESTS_NATIVE_AGREEMENT_H_
#define KERAS_RING_TESTS_NATIVE_AGREEMENT_H_

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/messages.h"
#include "engine/readiness.h"
#include "transport/topology.h"

class Agreement {
 public:
  struct Rank {
    std::unique_ptr<keras_ring::Readiness> readiness;
    std::map<std::string, std::pair<std::string, keras_ring::Signature>> waiting;  // by key
    std::deque<std::string> upward;                      // on their way to the parent
    std::deque<std::string> publications;                // on their way from the parent
    std::vector<std::string> agreed;                     // keys, in order
    std::vector<keras_ring::Readiness::Ready> stood_in;  // of these, what this rank had not called
    std::int32_t last_joined = -1;
    std::vector<keras_ring::Refused> refused;
    std::vector<std::string> reports;
    std::vector<keras_ring::Departure> departures;
  };

  Agreement(const keras_ring::Topology& topology, const keras_ring::Options& options)
      : places_(keras_ring::AgreementTree(topology)), ranks_(topology.size()) {
    for (int rank = 0; rank < topology.size(); ++rank) {
      ranks_[rank].readiness = std::make_unique<keras_ring::Readiness>(rank, topology, options);
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& operator[](int rank) { return ranks_[rank]; }

  void Call(int rank, const std::string& name, const keras_ring::Signature& signature) {
    ranks_[rank].waiting[keras_ring::KeyOf(name)] = {name, signature};
    ranks_[rank].readiness->AddOwn(name, signature, now_s);
  }
  void CallOnAll(const std::string& name, const keras_ring::Signature& signature) {
    for (int rank = 0; rank < size(); ++rank) Call(rank, name, signature);
  }

  // The three things that happen; each is false when there is nothing to do.
  bool Speak(int rank, bool may_agree = true) {
    Rank& own = ranks_[rank];
    if (rank > 0) {
      const auto message = own.readiness->TakeUpward(now_s);
      if (message) own.upward.push_back(Encode(*message));
      return message.has_value();
    }
    const auto publication = own.readiness->TakePublication(may_agree, now_s);
    if (publication) Apply(0, Encode(*publication));
    return publication.has_value();
  }
  bool CarryUp(int rank) {
    Rank& own = ranks_[rank];
    if (own.upward.empty()) return false;
    ranks_[places_[rank].parent].readiness->AddFromChild(
        rank, keras_ring::DecodeUpward(own.upward.front()), now_s);
    own.upward.pop_front();
    return true;
  }
  bool CarryDown(int rank) {
    if (ranks_[rank].publications.empty()) return false;
    const std::string bytes = ranks_[rank].publications.front();
    ranks_[rank].publications.pop_front();
    Apply(rank, bytes);
    return true;
  }

  // Until nobody has anything to say.
  void Settle(bool may_agree = true) {
    for (bool has_news = true; has_news;) {
      has_news = false;
      for (int rank = size() - 1; rank >= 0; --rank) {
        has_news = CarryDown(rank) || has_news;
        has_news = Speak(rank, may_agree) || has_news;
        has_news = CarryUp(rank) || has_news;
      }
    }
  }

  double now_s = 1000;

 private:
  // As the engine does it: pass on, take in, and after a refusal tell what still waits anew.
  void Apply(int rank, const std::string& bytes) {
    for (const int child : places_[rank].children) ranks_[child].publications.push_back(bytes);
    const auto publication = keras_ring::DecodePublication(bytes);
    Rank& own = ranks_[rank];
    const bool had_joined = own.readiness->has_joined();
    for (const auto& ready : own.readiness->Apply(publication)) {
      own.agreed.push_back(ready.key);
      if (own.waiting.erase(ready.key) == 0) {
        CHECK(had_joined);
        own.stood_in.push_back(ready);
      } else if (ready.signature->kind == keras_ring::Kind::kJoin) {
        own.last_joined = publication.last_joined;
      }
    }
    for (const auto& refused : publication.refused) {
      own.refused.push_back(refused);
      own.waiting.erase(refused.key);
    }
    if (!publication.refused.empty()) {
      for (const auto& [key, call] : own.waiting) {
        own.readiness->AddOwn(call.first, call.second, now_s);
      }
    }
    own.reports.insert(own.reports.end(), publication.reports.begin(), publication.reports.end());
    own.departures.insert(own.departures.end(), publication.departures.begin(),
                          publication.departures.end());
  }

  const std::vector<keras_ring::TreePlace> places_;
  std::vector<Rank> ranks_;
};

#endif  // KERAS_RING_TESTS_NATIVE_AGREEMENT_H_
