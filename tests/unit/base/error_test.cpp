#include "base/error.hpp"

#include <gtest/gtest.h>

#include <map>
#include <memory>

namespace f8 {
namespace {

Result<int> positive(int value) {
  if (value <= 0) return fail(ErrorCode::kInvalidArgument, "{} is not positive", value);
  return value;
}

Status check(int value, bool& reached_end) {
  F8_TRY(positive(value));
  reached_end = true;
  return {};
}

Result<std::string> twice(int value) {
  return std::to_string(2 * F8_TRY(positive(value)));
}

TEST(Try, YieldsTheValue) {
  EXPECT_EQ(twice(3).value(), "6");
  bool reached_end = false;
  EXPECT_TRUE(check(1, reached_end));
  EXPECT_TRUE(reached_end);
}

TEST(Try, ReturnsTheErrorAsItWas) {
  bool reached_end = false;
  const Status status = check(-1, reached_end);
  ASSERT_FALSE(status);
  EXPECT_FALSE(reached_end);
  EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(status.error().message, "-1 is not positive");
  EXPECT_EQ(twice(0).error().message, "0 is not positive");
}

TEST(Try, EvaluatesOnceAndTakesCommas) {
  int calls = 0;
  const auto counted = [&calls]() -> Result<std::map<int, int>> {
    ++calls;
    return std::map<int, int>{{1, 2}};
  };
  const auto use = [&]() -> Result<int> {
    const std::map<int, int> m = F8_TRY(Result<std::map<int, int>>(counted()));
    return m.at(1);
  };
  EXPECT_EQ(use().value(), 2);
  EXPECT_EQ(calls, 1);
}

TEST(Try, MovesWhatCannotBeCopied) {
  const auto make = []() -> Result<std::unique_ptr<int>> { return std::make_unique<int>(7); };
  const auto use = [&]() -> Result<std::unique_ptr<int>> {
    std::unique_ptr<int> owned = F8_TRY(make());
    ++*owned;
    return owned;
  };
  EXPECT_EQ(**use(), 8);
}

}  // namespace
}  // namespace f8
