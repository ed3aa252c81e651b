#include "base/text.hpp"

#include <gtest/gtest.h>

namespace f8 {
namespace {

TEST(Quote, PrintableTextIsItself) {
  EXPECT_EQ(quote(""), "''");
  EXPECT_EQ(quote("rowwise"), "'rowwise'");
  EXPECT_EQ(quote("a b~"), "'a b~'");
}

TEST(Quote, OtherBytesAreEscapedAndLongTextIsCut) {
  EXPECT_EQ(quote("a\nb\x1b[31m\xff"), "'a\\x0ab\\x1b[31m\\xff'");
  EXPECT_EQ(quote(std::string_view("\0", 1)), "'\\x00'");
  EXPECT_EQ(quote("\x7f"), "'\\x7f'");
  EXPECT_EQ(quote("abcdef", 6), "'abcdef'");
  EXPECT_EQ(quote("abcdef", 5), "'abcde'...");
  EXPECT_LE(quote(std::string(1 << 20, '\n')).size(), 405U);
}

TEST(TakeUntil, SplitsOffTheFront) {
  std::string_view rest = "a,,b";
  EXPECT_EQ(take_until(rest, ','), "a");
  EXPECT_EQ(take_until(rest, ','), "");
  EXPECT_EQ(rest, "b");
  EXPECT_EQ(take_until(rest, ','), "b");
  EXPECT_EQ(take_until(rest, ','), "");
  EXPECT_TRUE(rest.empty());
}

}  // namespace
}  // namespace f8
