// The loops of the arithmetic. Each kernels_*.cc includes this file once, after it has told the
// compiler for which processor and has defined how float32 values are loaded from 16-bit floats and
// stored as such:
//
//   constexpr std::size_t kLanes;             values at a time
//   struct Isa {
//     using Floats;                           as many float32 values, with operators
//     template <T> static Floats Load(const T*);      T: Float16, Bfloat16, float
//     template <T> static void Store(Floats, T*);
//   };
//
// All is in an unnamed namespace, so that the linker never takes a function that was compiled for
// one processor for that of another. For the same reason nothing is included here.
#ifndef KERAS_RING_REDUCE_LOOPS_H_
#define KERAS_RING_REDUCE_LOOPS_H_

namespace keras_ring {
namespace {

template <typename T>
struct IsComplexType : std::false_type {};
template <typename T>
struct IsComplexType<std::complex<T>> : std::true_type {};

// What is no number of C++ but is summed as one: 16-bit floats.
template <typename T>
inline constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;

template <typename T>
inline constexpr bool kIsInteger = std::is_integral_v<T> && !std::is_same_v<T, bool>;

template <typename T>
T Multiply(const T& a, const T& b) {
  if constexpr (IsComplexType<T>::value) {
    // The textbook formula, as NumPy uses it: operator* would check every product for NaN and
    // keep the loop from being vectorised.
    return T(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
  } else if constexpr (kIsInteger<T>) {
    // Wraps like NumPy: in uint64, because small unsigned types promote to (overflowing) int.
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else {
    return static_cast<T>(a * b);
  }
}

template <typename T>
T Add(const T& a, const T& b) {
  if constexpr (kIsInteger<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return static_cast<T>(a + b);
  }
}

// `T` may be a vector of float32. NaN wins in min and max on either side, as in NumPy, so that no
// rank's NaN is lost; of equals (-0.0 and 0.0 are equal) the second is taken.
template <ReduceOp op, typename T>
T Apply(const T& a, const T& b) {
  if constexpr (op == ReduceOp::kSum) {
    return Add(a, b);
  } else if constexpr (op == ReduceOp::kProduct) {
    return Multiply(a, b);
  } else if constexpr (IsComplexType<T>::value) {
    return a;  // not reached: IsReducible refuses it
  } else if constexpr (std::is_integral_v<T>) {
    if constexpr (op == ReduceOp::kMin) return b < a ? b : a;
    return a < b ? b : a;
  } else if constexpr (op == ReduceOp::kMin) {
    return ((a < b) | (a != a)) ? a : b;
  } else {
    return ((a > b) | (a != a)) ? a : b;
  }
}

constexpr bool IsPowerOf2(std::int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

// The forms of a scale. Dividing by a power of two and multiplying by its inverse give the same
// bits, subnormals included, and a multiplication takes a tenth of a division's time.
struct Unscaled {
  explicit Unscaled(const Scale&) {}
  template <typename V>
  V operator()(const V& value) const {
    return value;
  }
};

template <typename Part>
struct Multiplied {
  explicit Multiplied(const Scale& scale)
      : factor(static_cast<Part>(scale.factor)),
        inverse(Part{1} / static_cast<Part>(scale.divisor)) {}
  template <typename V>
  V operator()(const V& value) const {
    return value * factor * inverse;
  }
  const Part factor;
  const Part inverse;
};

template <typename Part>
struct Divided {
  explicit Divided(const Scale& scale)
      : factor(static_cast<Part>(scale.factor)), divisor(static_cast<Part>(scale.divisor)) {}
  template <typename V>
  V operator()(const V& value) const {
    if constexpr (IsComplexType<V>::value) {
      return V(value.real() * factor / divisor, value.imag() * factor / divisor);
    } else {
      return value * factor / divisor;
    }
  }
  const Part factor;
  const Part divisor;
};

template <typename T>
T FloorDivide(T value, std::int64_t divisor) {
  if constexpr (std::is_signed_v<T>) {
    const std::int64_t wide = value;
    const std::int64_t quotient = wide / divisor;
    return static_cast<T>(wide % divisor != 0 && wide < 0 ? quotient - 1 : quotient);
  } else {
    return static_cast<T>(value / static_cast<std::uint64_t>(divisor));
  }
}

// What C++ leaves open (and processors differ in) is settled: beyond the type's range its end is
// taken, and NaN is 0.
template <typename T>
T Saturated(double value) {
  constexpr auto kLeast = static_cast<double>(std::numeric_limits<T>::min());
  // For 64 bits this rounds up, to the first number that is too large.
  constexpr auto kMost = static_cast<double>(std::numeric_limits<T>::max());
  if (value >= kMost) return std::numeric_limits<T>::max();
  if (value <= kLeast) return std::numeric_limits<T>::min();
  return value != value ? T{0} : static_cast<T>(value);
}

// Integers, in whatever way.
struct ScaledInteger {
  explicit ScaledInteger(const Scale& by) : scale(by) {}
  template <typename T>
  T operator()(T value) const {
    const T product =
        scale.factor == 1.0 ? value : Saturated<T>(static_cast<double>(value) * scale.factor);
    return scale.divisor == 1 ? product : FloorDivide(product, scale.divisor);
  }
  const Scale scale;
};

// Integers, divided by a power of two: a shift rounds down, as it should.
struct Shifted {
  explicit Shifted(const Scale& scale) : bits(__builtin_ctzll(scale.divisor)) {}
  template <typename T>
  T operator()(T value) const {
    return static_cast<T>(value >> bits);
  }
  const int bits;
};

// Integers of at most 32 bits, divided: in floating point with twice as many bits the quotient of
// two such numbers is never rounded up to the next whole number, of which it falls short by more
// than 2^-32 (with 16 bits, 2^-16) of its value. Larger divisors may be rounded, but the quotient's
// sign is all that counts then.
struct DividedInteger {
  explicit DividedInteger(const Scale& scale) : divisor(scale.divisor) {}
  template <typename T>
  T operator()(T value) const {
    using Real = std::conditional_t<sizeof(T) <= 2, float, double>;
    using Whole = std::conditional_t<std::is_same_v<T, std::uint32_t>, std::int64_t, std::int32_t>;
    const Real quotient = static_cast<Real>(value) / static_cast<Real>(divisor);
    const auto cut = static_cast<Whole>(quotient);
    return static_cast<T>(cut - (static_cast<Real>(cut) > quotient ? 1 : 0));
  }
  const std::int64_t divisor;
};

template <ReduceOp op, typename T, typename P, typename A, typename S>
void CombineLoop(const P* partial, const T* own, const S scale, A* to, std::size_t elems) {
  std::size_t i = 0;
  if constexpr (kIsHalf<T>) {
    for (; i + kLanes <= elems; i += kLanes) {
      Isa::Store(Apply<op>(Isa::Load(partial + i), scale(Isa::Load(own + i))), to + i);
    }
  }
  for (; i < elems; ++i) {
    to[i] = Apply<op>(static_cast<A>(partial[i]), scale(static_cast<A>(own[i])));
  }
}

template <typename From, typename T, typename A, typename S>
void ScaleLoop(const From* from, const S scale, T* to, std::size_t elems) {
  std::size_t i = 0;
  if constexpr (kIsHalf<From> || kIsHalf<T>) {
    for (; i + kLanes <= elems; i += kLanes) {
      Isa::Store(scale(Isa::Load(from + i)), to + i);
    }
  }
  for (; i < elems; ++i) to[i] = static_cast<T>(scale(static_cast<A>(from[i])));
}

// The real numbers that a type consists of, and how many.
template <typename A>
struct Parts {
  using Type = A;
  static constexpr std::size_t kNum = 1;
};
template <typename Part>
struct Parts<std::complex<Part>> {
  using Type = Part;
  static constexpr std::size_t kNum = 2;
};

template <ReduceOp op, typename T, typename P, typename A>
void CombineScaled(const void* partial, const void* own, const Scale& scale, void* to,
                   std::size_t elems) {
  const auto* p = static_cast<const P*>(partial);
  const auto* o = static_cast<const T*>(own);
  auto* t = static_cast<A*>(to);
  if (scale.is_identity() || std::is_same_v<A, bool>) {
    return CombineLoop<op>(p, o, Unscaled(scale), t, elems);
  }
  if constexpr (kIsInteger<A>) {
    CombineLoop<op>(p, o, ScaledInteger(scale), t, elems);
  } else if constexpr (!std::is_same_v<A, bool>) {
    CombineLoop<op>(p, o, Divided<typename Parts<A>::Type>(scale), t, elems);
  }
}

template <typename T, typename P, typename A>
void CombineTyped(ReduceOp op, const void* partial, const void* own, const Scale& scale, void* to,
                  std::size_t elems) {
  if constexpr (IsComplexType<T>::value) {
    // Sums of complex numbers are sums of their parts.
    using Part = typename T::value_type;
    if (op == ReduceOp::kSum) {
      return CombineScaled<ReduceOp::kSum, Part, Part, Part>(partial, own, scale, to, 2 * elems);
    }
  }
  switch (op) {
    case ReduceOp::kSum:
      return CombineScaled<ReduceOp::kSum, T, P, A>(partial, own, scale, to, elems);
    case ReduceOp::kMin:
      return CombineScaled<ReduceOp::kMin, T, P, A>(partial, own, scale, to, elems);
    case ReduceOp::kMax:
      return CombineScaled<ReduceOp::kMax, T, P, A>(partial, own, scale, to, elems);
    case ReduceOp::kProduct:
      return CombineScaled<ReduceOp::kProduct, T, P, A>(partial, own, scale, to, elems);
  }
}

template <typename From, typename T, typename A>
void ScaleTyped(const void* from, const Scale& scale, void* to, std::size_t elems) {
  if constexpr (IsComplexType<T>::value) {
    using Part = typename T::value_type;
    return ScaleTyped<Part, Part, Part>(from, scale, to, 2 * elems);
  } else {
    const auto* f = static_cast<const From*>(from);
    auto* t = static_cast<T*>(to);
    const bool is_power = IsPowerOf2(scale.divisor);
    if (scale.is_identity() || std::is_same_v<A, bool>) {
      if constexpr (std::is_same_v<From, T>) {
        if (from != to && elems > 0) std::memcpy(to, from, elems * sizeof(T));
      } else {
        ScaleLoop<From, T, A>(f, Unscaled(scale), t, elems);
      }
    } else if constexpr (std::is_floating_point_v<A>) {
      if (is_power) return ScaleLoop<From, T, A>(f, Multiplied<A>(scale), t, elems);
      ScaleLoop<From, T, A>(f, Divided<A>(scale), t, elems);
    } else if constexpr (kIsInteger<A>) {
      if (scale.factor == 1.0 && is_power) {
        return ScaleLoop<From, T, A>(f, Shifted(scale), t, elems);
      }
      if constexpr (sizeof(A) <= 4) {
        if (scale.factor == 1.0) {
          return ScaleLoop<From, T, A>(f, DividedInteger(scale), t, elems);
        }
      }
      ScaleLoop<From, T, A>(f, ScaledInteger(scale), t, elems);
    }
  }
}

void CombineAny(DType dtype, ReduceOp op, Format partial_format, const void* partial,
                const void* own, const Scale& scale, void* to, std::size_t elems) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator)                                   \
  case DType::enumerator:                                                                         \
    if (partial_format == Format::kAccumulator) {                                                 \
      return CombineTyped<storage, accumulator, accumulator>(op, partial, own, scale, to, elems); \
    }                                                                                             \
    return CombineTyped<storage, storage, accumulator>(op, partial, own, scale, to, elems);
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
}

void WidenAny(DType dtype, const void* from, const Scale& scale, void* to, std::size_t elems) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator) \
  case DType::enumerator:                                       \
    return ScaleTyped<storage, accumulator, accumulator>(from, scale, to, elems);
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
}

void ScaleAny(DType dtype, Format from_format, const void* from, const Scale& scale, void* to,
              std::size_t elems) {
  switch (dtype) {
#define KERAS_RING_CASE(enumerator, name, storage, accumulator)                     \
  case DType::enumerator:                                                           \
    if (from_format == Format::kAccumulator) {                                      \
      return ScaleTyped<accumulator, storage, accumulator>(from, scale, to, elems); \
    }                                                                               \
    return ScaleTyped<storage, storage, accumulator>(from, scale, to, elems);
    KERAS_RING_DTYPES(KERAS_RING_CASE)
#undef KERAS_RING_CASE
  }
}

}  // namespace
}  // namespace keras_ring

#endif  // KERAS_RING_REDUCE_LOOPS_H_
