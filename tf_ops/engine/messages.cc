#include "engine/messages.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace keras_ring {
namespace {

// Writes values one after the other; strings and lists with their length in front.
class Writer {
 public:
  explicit Writer(MessageType type) { Put(type); }

  template <typename T>
  void Put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void Put(const std::string& text) {
    Put(static_cast<std::uint32_t>(text.size()));
    bytes_ += text;
  }
  template <typename T>
  void Put(const std::vector<T>& list) {
    PutList(list, [this](const T& value) { Put(value); });
  }
  template <typename T, typename PutOne>
  void PutList(const std::vector<T>& list, PutOne put_one) {
    Put(static_cast<std::uint32_t>(list.size()));
    for (const T& value : list) put_one(value);
  }

  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  Reader(const std::string& bytes, MessageType type) : bytes_(bytes) {
    if (Get<MessageType>() != type) Fail();
  }

  template <typename T>
  T Get() {
    if constexpr (std::is_same_v<T, std::string>) {
      const auto size = Get<std::uint32_t>();
      return std::string(Take(size), size);
    } else if constexpr (std::is_same_v<T, bool>) {
      return Get<std::uint8_t>() != 0;  // a bool of any other value would be undefined
    } else {
      static_assert(std::is_trivially_copyable_v<T>);
      T value;
      std::memcpy(&value, Take(sizeof value), sizeof value);
      return value;
    }
  }
  template <typename T>
  std::vector<T> GetList() {
    return GetList<T>([this] { return Get<T>(); });
  }
  template <typename T, typename GetOne>
  std::vector<T> GetList(GetOne get_one) {
    std::vector<T> list;
    for (auto left = Get<std::uint32_t>(); left > 0; --left) list.push_back(get_one());
    return list;
  }

  void ExpectEnd() const {
    if (at_ != bytes_.size()) Fail();
  }

  [[noreturn]] static void Fail() {
    throw Error(Code::kInternal,
                "a control message cannot be read: the ranks run different builds of keras_ring, "
                "or this is a bug. Compare `keras-ring --version` on all hosts.");
  }

 private:
  const char* Take(std::size_t size) {
    if (size > bytes_.size() - at_) Fail();
    at_ += size;
    return bytes_.data() + at_ - size;
  }

  const std::string& bytes_;
  std::size_t at_ = 0;
};

void Put(Writer* writer, const Signature& signature) {
  writer->Put(signature.kind);
  writer->Put(signature.op);
  writer->Put(signature.is_mean);
  writer->Put(signature.is_adasum);
  writer->Put(signature.compression);
  writer->Put(signature.root);
  writer->Put(signature.prescale);
  writer->Put(signature.postscale);
  writer->Put(signature.dtypes);
  writer->PutList(signature.shapes, [writer](const Shape& shape) { writer->Put(shape); });
  writer->Put(signature.problem);
}

Signature GetSignature(Reader* reader) {
  Signature signature;
  signature.kind = reader->Get<Kind>();
  signature.op = reader->Get<ReduceOp>();
  signature.is_mean = reader->Get<bool>();
  signature.is_adasum = reader->Get<bool>();
  signature.compression = reader->Get<Compression>();
  signature.root = reader->Get<std::int32_t>();
  signature.prescale = reader->Get<double>();
  signature.postscale = reader->Get<double>();
  signature.dtypes = reader->GetList<DType>();
  signature.shapes = reader->GetList<Shape>([reader] { return reader->GetList<std::int64_t>(); });
  signature.problem = reader->Get<std::string>();
  return signature;
}

void Put(Writer* writer, const Status& status) {
  writer->Put(status.code);
  writer->Put(status.message);
}

Status GetStatus(Reader* reader) {
  Status status;
  status.code = reader->Get<Code>();
  status.message = reader->Get<std::string>();
  return status;
}

void Put(Writer* writer, const std::vector<Departure>& departures) {
  writer->PutList(departures, [writer](const Departure& departure) {
    writer->Put(departure.rank);
    writer->Put(departure.reason);
  });
}

std::vector<Departure> GetDepartures(Reader* reader) {
  return reader->GetList<Departure>([reader] {
    Departure departure;
    departure.rank = reader->Get<std::int32_t>();
    departure.reason = reader->Get<std::string>();
    return departure;
  });
}

// Numbers of requests are dense, so a set of them is a first number and one bit for each that
// follows, unless a list is shorter.
void PutNumbers(Writer* writer, const std::vector<std::uint32_t>& numbers) {
  if (numbers.empty()) return writer->Put(std::uint8_t{0});
  const auto [low, high] = std::minmax_element(numbers.begin(), numbers.end());
  const std::size_t bitmap_bytes = (*high - *low) / 8 + 1;
  if (bitmap_bytes >= 4 * numbers.size()) {
    writer->Put(std::uint8_t{1});
    return writer->Put(numbers);
  }
  std::string bitmap(bitmap_bytes, '\0');
  for (const std::uint32_t number : numbers) {
    bitmap[(number - *low) / 8] |= static_cast<char>(1u << ((number - *low) % 8));
  }
  writer->Put(std::uint8_t{2});
  writer->Put(*low);
  writer->Put(bitmap);
}

std::vector<std::uint32_t> GetNumbers(Reader* reader) {
  const auto form = reader->Get<std::uint8_t>();
  if (form == 0) return {};
  if (form == 1) return reader->GetList<std::uint32_t>();
  if (form != 2) Reader::Fail();
  const auto low = reader->Get<std::uint32_t>();
  const auto bitmap = reader->Get<std::string>();
  std::vector<std::uint32_t> numbers;
  for (std::uint32_t bit = 0; bit < 8 * bitmap.size(); ++bit) {
    if ((bitmap[bit / 8] >> (bit % 8) & 1) != 0) numbers.push_back(low + bit);
  }
  return numbers;
}

}  // namespace

std::string Encode(const Upward& message) {
  Writer writer(MessageType::kUpward);
  writer.Put(message.epoch);
  writer.Put(message.seen);
  PutNumbers(&writer, message.known);
  writer.PutList(message.named, [&writer](const NamedReadiness& named) {
    writer.Put(named.name);
    writer.Put(named.waited_s);
    writer.PutList(named.callers, [&writer](const Callers& callers) {
      Put(&writer, callers.signature);
      writer.Put(callers.ranks);
    });
  });
  writer.Put(message.joined);
  Put(&writer, message.departures);
  return writer.Take();
}

Upward DecodeUpward(const std::string& bytes) {
  Reader reader(bytes, MessageType::kUpward);
  Upward message;
  message.epoch = reader.Get<std::uint32_t>();
  message.seen = reader.Get<std::uint64_t>();
  message.known = GetNumbers(&reader);
  message.named = reader.GetList<NamedReadiness>([&reader] {
    NamedReadiness named;
    named.name = reader.Get<std::string>();
    named.waited_s = reader.Get<double>();
    named.callers = reader.GetList<Callers>([&reader] {
      Callers callers;
      callers.signature = GetSignature(&reader);
      callers.ranks = reader.GetList<std::int32_t>();
      return callers;
    });
    return named;
  });
  message.joined = reader.GetList<std::int32_t>();
  message.departures = GetDepartures(&reader);
  reader.ExpectEnd();
  return message;
}

std::string Encode(const Publication& message) {
  Writer writer(MessageType::kPublication);
  writer.Put(message.sequence);
  writer.PutList(message.agreed, [&writer](const Agreed& agreed) {
    writer.Put(agreed.is_known);
    if (agreed.is_known) {
      writer.Put(agreed.number);
      return;
    }
    writer.Put(agreed.key);
    writer.Put(agreed.has_call);
    if (!agreed.has_call) return;
    writer.Put(agreed.name);
    Put(&writer, agreed.signature);
  });
  writer.PutList(message.refused, [&writer](const Refused& refused) {
    writer.Put(refused.key);
    Put(&writer, refused.status);
  });
  writer.Put(message.last_joined);
  writer.Put(message.reports);
  Put(&writer, message.departures);
  return writer.Take();
}

Publication DecodePublication(const std::string& bytes) {
  Reader reader(bytes, MessageType::kPublication);
  Publication message;
  message.sequence = reader.Get<std::uint64_t>();
  message.agreed = reader.GetList<Agreed>([&reader] {
    Agreed agreed;
    agreed.is_known = reader.Get<bool>();
    if (agreed.is_known) {
      agreed.number = reader.Get<std::uint32_t>();
      return agreed;
    }
    agreed.key = reader.Get<std::string>();
    agreed.has_call = reader.Get<bool>();
    if (agreed.has_call) {
      agreed.name = reader.Get<std::string>();
      agreed.signature = GetSignature(&reader);
    }
    return agreed;
  });
  message.refused = reader.GetList<Refused>([&reader] {
    Refused refused;
    refused.key = reader.Get<std::string>();
    refused.status = GetStatus(&reader);
    return refused;
  });
  message.last_joined = reader.Get<std::int32_t>();
  message.reports = reader.GetList<std::string>();
  message.departures = GetDepartures(&reader);
  reader.ExpectEnd();
  return message;
}

std::string Encode(const Failure& message) {
  Writer writer(MessageType::kFailure);
  Put(&writer, message.status);
  return writer.Take();
}

Failure DecodeFailure(const std::string& bytes) {
  Reader reader(bytes, MessageType::kFailure);
  Failure message{GetStatus(&reader)};
  reader.ExpectEnd();
  return message;
}

MessageType TypeOf(const std::string& bytes) {
  if (bytes.empty()) throw Error(Code::kInternal, "an empty control message arrived");
  return static_cast<MessageType>(bytes[0]);
}

}  // namespace keras_ring
