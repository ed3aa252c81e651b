#include "base/text.hpp"

#include <gtest/gtest.h>

#include "base/error.hpp"

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
  EXPECT_EQ(quote(std::string(1 << 20, '\n')).size(), 80U * 4 + 5);
}

TEST(Printable, KeepsTextAndEscapesWhatCommandsATerminal) {
  EXPECT_EQ(printable("plain ~ text"), "plain ~ text");
  EXPECT_EQ(printable("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xc2\xa0"),
            "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xc2\xa0");
  EXPECT_EQ(printable("\x1b[31m\r\n\t\x7f"), "\\x1b[31m\\x0d\\x0a\\x09\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");  // CSI, one character of C1
  EXPECT_EQ(printable("a\x9b"
                      "b"),
            "a\\x9b"
            "b");  // the same without UTF-8
  EXPECT_EQ(printable("\xc0\x9b\xe0\x80\x9b"), "\\xc0\\x9b\\xe0\\x80\\x9b");  // too long
  EXPECT_EQ(printable("\xed\xa0\x80\xf5"), "\\xed\\xa0\\x80\\xf5");  // a surrogate, no lead
  EXPECT_EQ(printable("\xe2\x82"), "\\xe2\\x82");                    // cut off
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
  for (int byte = 0; byte < 256; ++byte) {
    const std::string one(1, static_cast<char>(byte));
    EXPECT_EQ(has_control(one), printable(one) != one) << byte;
    EXPECT_FALSE(has_control(printable(one))) << byte;
  }
}

TEST(Printable, EscapesWhatNobodySeesOrTurnsTextAround) {
  EXPECT_EQ(printable("a\xe2\x80\xae"
                      "b"),
            "a\\xe2\\x80\\xaeb");  // U+202E
  for (const char* hidden : {"\xc2\xad", "\xd8\x9c", "\xe2\x80\x8b", "\xe2\x80\xa8", "\xe2\x81\xa6",
                             "\xef\xbb\xbf", "\xf3\xa0\x81\x81"}) {
    EXPECT_TRUE(has_control(hidden)) << printable(hidden);
  }
}

TEST(MessageText, KeepsPathsAndClipsWhatIsLonger) {
  const std::string path(4096, 'p');
  EXPECT_EQ(message_text("cannot open " + path + ": no"), "cannot open " + path + ": no");
  EXPECT_EQ(message_text("got '" + std::string(10'000, 'x') + "', and no  more"),
            "got '" + std::string(79, 'x') + "... and no  more");
  std::string words;
  while (words.size() < 100'000) words += "word ";
  EXPECT_EQ(message_text(words), words.substr(0, kLongestMessage));
  EXPECT_EQ(message_text("\xe2\x80\xae"), "\\xe2\\x80\\xae");
  EXPECT_EQ(fail(ErrorCode::kInvalidArgument, "{}", std::string(5000, 'x')).error().message,
            std::string(80, 'x') + "...");
}

TEST(Split, HasAnItemMoreThanSeparators) {
  using Items = std::vector<std::string>;
  EXPECT_EQ(split("a,,b", ','), (Items{"a", "", "b"}));
  EXPECT_EQ(split("a,b,", ';'), Items{"a,b,"});
  EXPECT_EQ(split("a,", ','), (Items{"a", ""}));
  EXPECT_EQ(split("", ','), Items{""});
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
