#include "engine/known.h"

#include <utility>

namespace keras_ring {

std::optional<std::uint32_t> Known::Find(const std::string& key, const Signature& signature) const {
  const auto found = by_key_.find(key);
  if (found == by_key_.end() || !(*found->second->signature == signature)) return std::nullopt;
  return found->second->number;
}

const Known::Entry* Known::Get(std::uint32_t number) const {
  const auto found = by_number_.find(number);
  if (found != by_number_.end()) return &*found->second;
  for (const Retired& retired : retired_) {
    if (retired.entry.number == number) return &retired.entry;
  }
  return nullptr;
}

void Known::Add(const std::string& name, std::shared_ptr<const Signature> signature,
                std::uint64_t sequence) {
  const std::string key = KeyOf(name);
  const auto former = by_key_.find(key);
  if (former != by_key_.end()) Retire(former->second, sequence);
  entries_.push_back(Entry{next_number_++, key, name, std::move(signature)});
  const auto entry = std::prev(entries_.end());
  by_key_[key] = entry;
  by_number_[entry->number] = entry;
  if (static_cast<std::int64_t>(entries_.size()) > capacity_) Retire(entries_.begin(), sequence);
}

void Known::Touch(std::uint32_t number) {
  const auto found = by_number_.find(number);
  if (found != by_number_.end()) entries_.splice(entries_.end(), entries_, found->second);
}

void Known::ForgetRetired(std::uint64_t seen) {
  while (!retired_.empty() && retired_.front().sequence <= seen) retired_.pop_front();
}

void Known::Retire(std::list<Entry>::iterator entry, std::uint64_t sequence) {
  by_key_.erase(entry->key);
  by_number_.erase(entry->number);
  retired_.push_back(Retired{sequence, std::move(*entry)});
  entries_.erase(entry);
}

}  // namespace keras_ring
