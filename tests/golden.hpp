// Golden texts: files of tests/golden that say what a program's words are, so that they are reworded without editing a
// test. UPDATE_GOLDEN=1 in the environment writes them anew from the tests that run.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace f8::testing {

// Compares `text` with the file tests/golden/`name`.
[[nodiscard]] ::testing::AssertionResult is_golden(std::string_view name, std::string_view text);

// Whether `message` holds each token (a field, an option, a number that was given) and is the next
// line of the running test in tests/golden/messages.txt, where a line is `program Suite.Test: message`. Folders,
// process ids and addresses, which differ between runs, have names there. A test's lines are
// written where it passes; a line that no message has is a failure of its test, and of the program where it has no
// such test any more.
[[nodiscard]] ::testing::AssertionResult is_message(std::string_view message,
                                                    const std::vector<std::string_view>& tokens);

// The message of a text, an Error or Status of C++ or of the C ABI, or of a result that has one.
template <class T>
std::string message_of(const T& said) {
  if constexpr (requires { std::string_view(said); }) {
    return std::string(std::string_view(said));
  } else if constexpr (requires { said.error(); }) {
    return said ? "no error" : message_of(said.error());
  } else if constexpr (requires { said.message(); }) {
    return message_of(said.message());
  } else {
    return said.message;
  }
}

#define EXPECT_MESSAGE(said, ...) \
  EXPECT_TRUE(::f8::testing::is_message(::f8::testing::message_of(said), {__VA_ARGS__}))

}  // namespace f8::testing
