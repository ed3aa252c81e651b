#include "base/format.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

namespace f8 {
namespace {

TEST(Format, FormatsAsFmtDoes) {
  const std::string text = "text";
  EXPECT_EQ(f8::format("{} {:>4} {:.3f} {:016x} {}", text, 7, 0.5, 0xabcu, true),
            "text    7 0.500 0000000000000abc true");
  EXPECT_EQ(f8::format("{}", 0.1), "0.1");
  EXPECT_EQ(f8::format("{{}}"), "{}");
}

TEST(Format, PrintsAllBytesToTheFile) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  f8::print(file, "{}\n", std::string("a\0b", 3));
  EXPECT_EQ(std::ftell(file), 4);
  std::rewind(file);
  char bytes[8] = {};
  EXPECT_EQ(std::fread(bytes, 1, sizeof bytes, file), 4u);
  EXPECT_EQ(std::string(bytes, 4), std::string("a\0b\n", 4));
  std::fclose(file);
}

}  // namespace
}  // namespace f8
