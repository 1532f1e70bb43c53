// Values under small reusable numbers: how a transport names its running transfers.
#ifndef KERAS_RING_TRANSPORT_SLOTS_H_
#define KERAS_RING_TRANSPORT_SLOTS_H_

#include <cstdint>
#include <utility>
#include <vector>

namespace keras_ring {

template <typename T>
class Slots {
 public:
  std::int32_t Add(T value) {
    if (free_.empty()) {
      values_.push_back(std::move(value));
      return static_cast<std::int32_t>(values_.size()) - 1;
    }
    const std::int32_t id = free_.back();
    free_.pop_back();
    values_[id] = std::move(value);
    return id;
  }

  T& operator[](std::int32_t id) { return values_[id]; }

  void Remove(std::int32_t id) {
    values_[id] = T{};
    free_.push_back(id);
  }

 private:
  std::vector<T> values_;
  std::vector<std::int32_t> free_;
};

}  // namespace keras_ring

#endif  // KERAS_RING_TRANSPORT_SLOTS_H_
