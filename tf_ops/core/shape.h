// Shapes as plain vectors, printed as Python tuples.
#ifndef KERAS_RING_CORE_SHAPE_H_
#define KERAS_RING_CORE_SHAPE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace keras_ring {

using Shape = std::vector<std::int64_t>;

inline std::int64_t NumElems(const Shape& shape) {
  std::int64_t elems = 1;
  for (const std::int64_t dim : shape) elems *= dim;
  return elems;
}

// "()", "(3,)", "(2, 3)". A negative dimension may differ between ranks and prints as "?".
inline std::string ToString(const Shape& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? "?" : std::to_string(shape[i]);
  }
  if (shape.size() == 1) text += ",";
  return text + ")";
}

}  // namespace keras_ring

#endif  // KERAS_RING_CORE_SHAPE_H_
