// Runs the cases named on the command line, or all; `--list` prints their names. A case that does
// not end is the usual failure of this kind of software: then the process aborts and says which.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "check.h"

namespace check {

thread_local std::string Note::current;

std::vector<Case>& Cases() {
  static std::vector<Case> cases;
  return cases;
}

void Fail(const char* file, int line, const std::string& what) {
  throw Failure(Text(file, ":", line, ": ", what, "\n", Note::current));
}

namespace {

// ThreadSanitizer on two busy cores is twenty times slower than the plain build.
constexpr unsigned kLimit_s = 100;

const char* running_case = "";

void StopHangingCase(int) {
  // Nothing but write is allowed here.
  for (const char* text : {"\nTIME LIMIT: ", running_case, "\n"}) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
  }
  abort();
}

bool Run(const Case& one) {
  running_case = one.name;
  alarm(kLimit_s);
  const auto start = std::chrono::steady_clock::now();
  std::string failure;
  try {
    one.run();
  } catch (const std::exception& error) {
    failure = *error.what() == '\0' ? "an exception without a text" : error.what();
  }
  alarm(0);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("%s %6.2f s  %s\n%s", failure.empty() ? "ok    " : "FAILED", took.count(), one.name,
              failure.c_str());
  std::fflush(stdout);
  return failure.empty();
}

}  // namespace
}  // namespace check

int main(int argc, char** argv) {
  signal(SIGALRM, check::StopHangingCase);
  const std::vector<std::string> wanted(argv + 1, argv + argc);
  if (wanted == std::vector<std::string>{"--list"}) {
    for (const check::Case& one : check::Cases()) std::puts(one.name);
    return EXIT_SUCCESS;
  }
  std::size_t num_run = 0;
  std::size_t num_failed = 0;
  for (const check::Case& one : check::Cases()) {
    if (!wanted.empty() && std::count(wanted.begin(), wanted.end(), one.name) == 0) continue;
    ++num_run;
    num_failed += check::Run(one) ? 0 : 1;
  }
  const bool is_right = num_failed == 0 && num_run >= std::max<std::size_t>(wanted.size(), 1);
  std::printf("%zu run, %zu failed\n", num_run, num_failed);
  return is_right ? EXIT_SUCCESS : EXIT_FAILURE;
}
