#include "tests/fuzz/fuzz.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <iterator>

#include "base/text.hpp"

namespace f8::fuzz {
namespace {

constexpr std::string_view kNumbers[] = {"0",          "1",    "15",
                                         "16",         "-1",   "1073741824",
                                         "1073741840", "00",   "9223372036854775807",
                                         "1e9",        "0x10", "99999999999999999999999"};
constexpr std::string_view kPieces[] = {"/", ".", ",", ";",  ":",   "x",    " ",     "\n", "\r\n",
                                        "m", "n", "k", "b1", "f1",  "e5m2", "f32",   "tn", "end ",
                                        "h", "_", "%", "{}", "nan", "inf",  "linear"};

using Random = std::mt19937_64;

size_t below(Random& random, size_t limit) {
  return limit == 0 ? 0 : random() % limit;  // not std::uniform_int_distribution: it may differ
}

template <size_t kCount>
std::string_view any_of(Random& random, const std::string_view (&choices)[kCount]) {
  return choices[below(random, kCount)];
}

void replace_a_number(Random& random, std::string& text) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto from = text.begin() + static_cast<ptrdiff_t>(below(random, text.size()));
  const auto begin = std::find_if(from, text.end(), is_digit);
  const auto end = std::find_if_not(begin, text.end(), is_digit);
  text.replace(begin, end, any_of(random, kNumbers));
}

void edit(Random& random, std::string& text, std::span<const std::string> corpus) {
  const size_t at = below(random, text.size() + 1);
  const size_t length = below(random, std::min<size_t>(text.size() - at, 12) + 1);
  switch (below(random, 7)) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(random());
      break;
    case 1:
      text.erase(at, length);
      break;
    case 2:
      text.insert(at, text.substr(at, length));
      break;
    case 3:
      replace_a_number(random, text);
      break;
    case 4:
      text.insert(at, any_of(random, kPieces));
      break;
    case 5:
      text.replace(at, length, any_of(random, kPieces));
      break;
    case 6: {
      const std::string& other = corpus[below(random, corpus.size())];
      const size_t from = below(random, other.size() + 1);
      text = text.substr(0, at) + other.substr(from);
      break;
    }
  }
}

std::string make_case(uint64_t index, std::span<const std::string> corpus) {
  std::seed_seq words{options().seed, index};
  Random random(words);
  std::string text = corpus[below(random, corpus.size())];
  for (size_t edits = below(random, 6); edits > 0; --edits) edit(random, text, corpus);
  return text;
}

bool take_option(std::string_view argument, std::string_view name, uint64_t& value) {
  if (!argument.starts_with(name)) return false;
  argument.remove_prefix(name.size());
  const auto [end, error] =
      std::from_chars(argument.data(), argument.data() + argument.size(), value);
  return error == std::errc() && end == argument.data() + argument.size();
}

}  // namespace

Options& options() {
  static Options instance;
  return instance;
}

void run(std::span<const std::string> corpus,
         const std::function<void(std::string_view text)>& check) {
  const uint64_t end = options().first + options().iterations;
  for (uint64_t i = options().first; i < end; ++i) {
    const std::string text = make_case(i, corpus);
    check(text);
    if (::testing::Test::HasFailure()) {
      const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
      FAIL() << "input " << quote(text, 4000)
             << "\nrepeat with: fuzz_parsers --seed=" << options().seed << " --first=" << i
             << " --iterations=1 --gtest_filter=" << test->test_suite_name() << "." << test->name();
    }
  }
}

void expect_readable(const std::string& message) {
  EXPECT_FALSE(message.empty());
  EXPECT_LE(message.size(), 1500U) << message;
  EXPECT_TRUE(std::ranges::all_of(message, [](char c) { return c >= ' ' && c <= '~'; })) << message;
}

}  // namespace f8::fuzz

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  f8::fuzz::Options& options = f8::fuzz::options();
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (f8::fuzz::take_option(argument, "--seed=", options.seed) ||
        f8::fuzz::take_option(argument, "--first=", options.first) ||
        f8::fuzz::take_option(argument, "--iterations=", options.iterations)) {
      continue;
    }
    std::fprintf(stderr, "unknown option %s; use --seed=N, --first=N or --iterations=N\n", argv[i]);
    return 1;
  }
  return RUN_ALL_TESTS();
}
