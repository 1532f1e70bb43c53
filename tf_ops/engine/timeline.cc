#include "engine/timeline.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/status.h"

namespace keras_ring {
namespace {

constexpr std::size_t kMuch = 256 * 1024;
constexpr double kLong_s = 0.2;

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      quoted += ' ';
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string Number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.3f", value);
  return text;
}

std::string StagesText(const Stages& stages, double took_s) {
  std::string text;
  double rest_s = took_s;
  for (const auto& [name, stage] : {std::pair<const char*, Stage>{"wait", Stage::kWait},
                                    {"pack", Stage::kPack},
                                    {"reduce", Stage::kReduce},
                                    {"unpack", Stage::kUnpack}}) {
    text += std::string(",\"") + name + "_us\":" + Number(stages[stage] * 1e6);
    rest_s -= stages[stage];
  }
  return text + ",\"rest_us\":" + Number(std::max(rest_s, 0.0) * 1e6);
}

std::string SetSuffix(const Options& options) {
  return options.process_set == 0 ? "" : "_set" + std::to_string(options.process_set);
}

std::string PathOf(const Options& options, int number) {
  return options.timeline + "/rank" + std::to_string(number) + SetSuffix(options) +
         (options.generation == 1 ? "" : "_generation" + std::to_string(options.generation)) +
         ".json";
}

std::FILE* Create(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "we");
  if (file == nullptr) {
    throw Error(Code::kInvalid, "the timeline " + path +
                                    " cannot be written: " + std::strerror(errno) +
                                    ". KERAS_RING_TIMELINE names a folder that every rank may "
                                    "write to.");
  }
  return file;
}

// Microseconds to add to steady time for the time since 1970. A thread may be put to sleep between
// the two looks, so the quickest of several pairs counts.
double OffsetUs() {
  using Us = std::chrono::duration<double, std::micro>;
  const auto steady_us = [] {
    return Us(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  double offset_us = 0;
  double least_us = 0;
  for (int i = 0; i < 10; ++i) {
    const double before_us = steady_us();
    const double now_us = Us(std::chrono::system_clock::now().time_since_epoch()).count();
    const double took_us = steady_us() - before_us;
    if (i > 0 && took_us >= least_us) continue;
    least_us = took_us;
    offset_us = now_us - before_us - took_us / 2;
  }
  return offset_us;
}

}  // namespace

Timeline::Timeline(const Options& options, int number, const std::string& describe)
    : file_(Create(PathOf(options, number))),
      number_(number),
      track_(options.process_set + 1),
      offset_us_(OffsetUs()) {
  // An array that is not closed is read as one that is, so that a file is whole at any moment.
  text_ = "[\n";
  for (const auto& [what, value] : {std::pair<const char*, std::string>{"process_name", describe},
                                    {"thread_name", "transfers" + SetSuffix(options)}}) {
    text_ += std::string("{\"ph\":\"M\",\"name\":\"") + what +
             "\",\"pid\":" + std::to_string(number_) + ",\"tid\":" + std::to_string(track_) +
             ",\"args\":{\"name\":" + Quoted(value) + "}},\n";
  }
}

void Timeline::AddWait(const Request& request, double since_s, double until_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Requests wait side by side, and slices of one track must nest: each is a track of its own.
  const std::string common = ",\"cat\":\"wait\",\"name\":" + Quoted(Describe(request)) +
                             ",\"id\":" + std::to_string(++num_waits_) +
                             ",\"pid\":" + std::to_string(number_) +
                             ",\"tid\":" + std::to_string(track_) + ",\"ts\":";
  text_ += "{\"ph\":\"b\"" + common + Microseconds(since_s) + "},\n";
  text_ += "{\"ph\":\"e\"" + common + Microseconds(until_s) + "},\n";
}

void Timeline::AddRun(const std::vector<Request*>& bucket, double since_s, double until_s,
                      const Stages& stages) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::int64_t bytes = 0;
  for (const Request* const request : bucket) bytes += OwnBytes(*request);
  std::string name = Describe(*bucket.front());
  if (bucket.size() > 1) name += " and " + std::to_string(bucket.size() - 1) + " more";
  text_ += "{\"ph\":\"X\",\"cat\":\"transfer\",\"name\":" + Quoted(name) +
           ",\"pid\":" + std::to_string(number_) + ",\"tid\":" + std::to_string(track_) +
           ",\"ts\":" + Microseconds(since_s) + ",\"dur\":" + Number((until_s - since_s) * 1e6) +
           ",\"args\":{\"bytes\":" + std::to_string(bytes) +
           ",\"requests\":" + std::to_string(bucket.size()) +
           StagesText(stages, until_s - since_s) + "}},\n";
}

std::string Timeline::Microseconds(double engine_s) const {
  return Number(engine_s * 1e6 + offset_us_);
}

void Timeline::Flush(double now_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (text_.empty() || (text_.size() < kMuch && now_s - flushed_s_ < kLong_s)) return;
  Write();
  flushed_s_ = now_s;
}

void Timeline::Close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (file_ == nullptr) return;
  Write();
  std::fclose(file_);
  file_ = nullptr;
}

void Timeline::Write() {
  if (file_ != nullptr) {
    std::fwrite(text_.data(), 1, text_.size(), file_);
    std::fflush(file_);
  }
  text_.clear();
}

void Timelines::Start(const Options& options, int number, const std::string& describe) {
  Stop();
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.push_back(std::make_unique<Timeline>(options, number, describe));
  current_.store(all_.back().get(), std::memory_order_release);
}

void Timelines::Stop() {
  Timeline* const timeline = current_.exchange(nullptr);
  if (timeline != nullptr) timeline->Close();
}

}  // namespace keras_ring
