// The names that all ranks know by number. Every rank applies the same publications in the same
// order, so the tables agree without a message of their own.
#ifndef KERAS_RING_ENGINE_KNOWN_H_
#define KERAS_RING_ENGINE_KNOWN_H_

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "engine/request.h"

namespace keras_ring {

class Known {
 public:
  struct Entry {
    std::uint32_t number = 0;
    std::string key;
    std::string name;  // with its label, for messages
    std::shared_ptr<const Signature> signature;
  };

  explicit Known(std::int64_t capacity) : capacity_(capacity) {}

  // The number of a name with this signature, if it has one.
  std::optional<std::uint32_t> Find(const std::string& key, const Signature& signature) const;

  // What a number stands for; null when there is none. Numbers are never used twice.
  const Entry* Get(std::uint32_t number) const;

  // Gives a name the next number, and takes the number of the name unused for longest away when the
  // table is full. Both happen on publication `sequence`. A name that comes with another signature
  // replaces its former self.
  void Add(const std::string& name, std::shared_ptr<const Signature> signature,
           std::uint64_t sequence);

  // The name was used again.
  void Touch(std::uint32_t number);

  // All children have taken in publication `seen`: what they send from now on does not mean numbers
  // that were taken away until then.
  void ForgetRetired(std::uint64_t seen);

 private:
  struct Retired {
    std::uint64_t sequence = 0;
    Entry entry;
  };

  void Retire(std::list<Entry>::iterator entry, std::uint64_t sequence);

  const std::int64_t capacity_;
  std::uint32_t next_number_ = 0;
  std::list<Entry> entries_;  // longest unused first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
  std::unordered_map<std::uint32_t, std::list<Entry>::iterator> by_number_;
  std::deque<Retired> retired_;  // ascending in sequence
};

}  // namespace keras_ring

#endif  // KERAS_RING_ENGINE_KNOWN_H_
