// A small test harness: TEST("sentence") { ... } registers a case; CHECK and CHECK_EQ end it with
// file, line and values when they do not hold. Loops over many parameters keep a Note, which is
// shown with the failure. check_main.cc runs the cases, each under a time limit.
#ifndef KERAS_RING_TESTS_NATIVE_CHECK_H_
#define KERAS_RING_TESTS_NATIVE_CHECK_H_

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*run)();
};

std::vector<Case>& Cases();

struct Registration {
  Registration(const char* name, void (*run)()) { Cases().push_back({name, run}); }
};

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Numbers as numbers (no characters), enums as their numbers, lists in brackets.
template <typename T>
void Print(std::ostream& out, const T& value) {
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<std::int64_t>(value);
  } else if constexpr (std::is_integral_v<T>) {
    out << +value;
  } else {
    out << value;
  }
}
template <typename T>
void Print(std::ostream& out, const std::vector<T>& list) {
  out << '[';
  for (std::size_t i = 0; i < list.size(); ++i) Print(out << (i > 0 ? ", " : ""), list[i]);
  out << ']';
}

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  out.precision(17);
  (Print(out, parts), ...);
  return out.str();
}

// What the parameters of this thread's loop are, for as long as the object lives.
class Note {
 public:
  template <typename... Parts>
  explicit Note(const Parts&... parts) : before_(current) {
    current += Text("  with ", parts..., "\n");
  }
  ~Note() { current = before_; }
  Note(const Note&) = delete;
  Note& operator=(const Note&) = delete;

  static thread_local std::string current;

 private:
  const std::string before_;
};

[[noreturn]] void Fail(const char* file, int line, const std::string& what);

}  // namespace check

#define CHECK_JOIN2(a, b) a##b
#define CHECK_JOIN(a, b) CHECK_JOIN2(a, b)
#define TEST(sentence)                                                                             \
  static void CHECK_JOIN(Case, __LINE__)();                                                        \
  static const check::Registration CHECK_JOIN(registration, __LINE__)(sentence,                    \
                                                                      CHECK_JOIN(Case, __LINE__)); \
  static void CHECK_JOIN(Case, __LINE__)()
#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::Fail(__FILE__, __LINE__, #condition); \
  } while (false)
#define CHECK_EQ(got, wanted)                                                                 \
  do {                                                                                        \
    const auto got_ = (got);                                                                  \
    const auto wanted_ = (wanted);                                                            \
    if (!(got_ == wanted_)) {                                                                 \
      check::Fail(__FILE__, __LINE__, check::Text(#got, " is ", got_, "; wanted ", wanted_)); \
    }                                                                                         \
  } while (false)
#define CHECK_HAS(text, part)                                                                    \
  do {                                                                                           \
    const std::string text_ = (text);                                                            \
    const std::string part_ = (part);                                                            \
    if (text_.find(part_) == std::string::npos) {                                                \
      check::Fail(__FILE__, __LINE__, check::Text("'", text_, "' does not hold '", part_, "'")); \
    }                                                                                            \
  } while (false)

#endif  // KERAS_RING_TESTS_NATIVE_CHECK_H_
