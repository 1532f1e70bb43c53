#include "engine/known.h"

#include "check.h"

namespace keras_ring {
namespace {

std::shared_ptr<const Signature> SignatureOf(std::int64_t elems) {
  Signature signature;
  signature.kind = Kind::kAllreduce;
  signature.dtypes = {DType::kFloat32};
  signature.shapes = {{elems}};
  return std::make_shared<const Signature>(signature);
}

bool Has(const Known& known, const std::string& key, std::int64_t elems = 1) {
  return known.Find(key, *SignatureOf(elems)).has_value();
}

TEST("a name has a number after it was added, and only with its signature") {
  Known known(10);
  CHECK(!Has(known, "a"));
  known.Add("a", SignatureOf(1), 1);
  CHECK(Has(known, "a", 1));
  CHECK(!Has(known, "a", 2));
  const auto number = known.Find("a", *SignatureOf(1));
  CHECK_EQ(known.Get(*number)->key, "a");
  CHECK(*known.Get(*number)->signature == *SignatureOf(1));
}

TEST("a number that was never given means nothing") {
  const Known known(10);
  CHECK(known.Get(0) == nullptr);
  CHECK(known.Get(12345) == nullptr);
}

TEST("a full table takes the number of the name that was unused for longest") {
  Known known(2);
  known.Add("a", SignatureOf(1), 1);
  known.Add("b", SignatureOf(1), 2);
  known.Touch(*known.Find("a", *SignatureOf(1)));
  known.Add("c", SignatureOf(1), 3);
  CHECK(Has(known, "a"));
  CHECK(!Has(known, "b"));
  CHECK(Has(known, "c"));
}

TEST("a name that comes with another signature has another number") {
  Known known(10);
  known.Add("a", SignatureOf(1), 1);
  const auto former = *known.Find("a", *SignatureOf(1));
  known.Add("a", SignatureOf(2), 2);
  CHECK(!Has(known, "a", 1));
  CHECK(*known.Find("a", *SignatureOf(2)) != former);
  CHECK(*known.Get(former)->signature == *SignatureOf(1));
}

TEST("a retired number keeps its meaning until all have taken in its retirement") {
  Known known(1);
  known.Add("a", SignatureOf(1), 1);
  const auto number = *known.Find("a", *SignatureOf(1));
  known.Add("b", SignatureOf(1), 5);
  known.ForgetRetired(4);
  CHECK_EQ(known.Get(number)->key, "a");
  known.ForgetRetired(5);
  CHECK(known.Get(number) == nullptr);
}

TEST("numbers are never used twice") {
  Known known(1);
  std::uint32_t last = 0;
  for (std::uint64_t i = 1; i < 100; ++i) {
    known.Add("a", SignatureOf(static_cast<std::int64_t>(i)), i);
    const auto number = *known.Find("a", *SignatureOf(static_cast<std::int64_t>(i)));
    CHECK(i == 1 || number > last);
    last = number;
    known.ForgetRetired(i);
  }
}

TEST("a touch of a retired number changes nothing") {
  Known known(1);
  known.Add("a", SignatureOf(1), 1);
  const auto number = *known.Find("a", *SignatureOf(1));
  known.Add("b", SignatureOf(1), 2);
  known.Touch(number);
  CHECK(Has(known, "b"));
  CHECK(!Has(known, "a"));
}

TEST("a table without room knows nothing, but still gives its numbers a meaning for a while") {
  Known known(0);
  known.Add("a", SignatureOf(1), 1);
  CHECK(!Has(known, "a"));
  CHECK_EQ(known.Get(0)->key, "a");
}

}  // namespace
}  // namespace keras_ring
