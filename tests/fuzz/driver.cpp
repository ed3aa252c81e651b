// Deterministic mutation fuzzing of one target: case i of a seed is the same text on every machine.
//
//   fuzz_TARGET [-runs=N] [-seed=N] [-first=N] [-max_total_time=SECONDS] [SEED FILE OR FOLDER ...]
//
// It replays the seeds and then runs N cases, or cases until the time is over. A case is one of the
// seeds after a few random edits: bytes changed, taken out, repeated, numbers made extreme, pieces of
// other seeds spliced in. An input that breaks a promise, crashes or takes 20 seconds is written to
// the file crash-input. The options are libFuzzer's, but for -first.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <random>
#include <span>
#include <vector>

#include "base/file.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace f8::fuzz {
namespace {

struct Options {
  uint64_t seed = 1;
  uint64_t first = 0;
  uint64_t runs = 20'000;
  uint64_t max_total_time = 0;  // seconds; 0: as many cases as -runs says
  std::vector<std::string> corpus;
};

constexpr unsigned kSlowestSeconds = 20;

constexpr std::string_view kNumbers[] = {"0",          "1",    "15",
                                         "16",         "-1",   "1073741824",
                                         "1073741840", "00",   "9223372036854775807",
                                         "1e9",        "0x10", "99999999999999999999999"};
constexpr std::string_view kPieces[] = {
    "/",  ".", ",", ";",   ":",  "x",    " ",  "\n", "\r\n", "m",    "n",    "k",
    "b1", "_", "%", "f32", "tn", "end ", "h",  "{}", "nan",  "inf",  "e5m2", "linear",
    "[",  "]", "{", "}",   "\"", "\":",  "\t", "*",  "null", "true", "\\u",  "\x1b[2J"};

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

std::string make_case(uint64_t seed, uint64_t index, std::span<const std::string> corpus) {
  std::seed_seq words{seed, index};
  Random random(words);
  std::string text = corpus[below(random, corpus.size())];
  for (size_t edits = below(random, 6); edits > 0; --edits) edit(random, text, corpus);
  return text;
}

std::string_view g_input;  // the one that runs

// Also called from a signal handler: nothing here allocates.
void save_input() {
  const int fd = ::open("crash-input", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  const bool written = fd >= 0 && ::write(fd, g_input.data(), g_input.size()) ==
                                      static_cast<ssize_t>(g_input.size());
  constexpr std::string_view kSaved =
      "the input is in ./crash-input; give that file to repeat it\n";
  constexpr std::string_view kLost = "the input could not be written to ./crash-input\n";
  const std::string_view line = written ? kSaved : kLost;
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0) ::_exit(2);
}

void on_signal(int signal) {
  save_input();
  ::_exit(128 + signal);
}

void run_one(std::string_view input) {
  g_input = input;
  ::alarm(kSlowestSeconds);
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  ::alarm(0);
}

bool take_option(std::string_view argument, std::string_view name, uint64_t& value) {
  if (!argument.starts_with(name)) return false;
  argument.remove_prefix(name.size());
  const auto [end, error] =
      std::from_chars(argument.data(), argument.data() + argument.size(), value);
  return error == std::errc() && end == argument.data() + argument.size();
}

Status add_corpus(const fs::path& path, std::vector<std::string>& corpus) {
  std::vector<fs::path> files;
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path());
    std::ranges::sort(files);
  } else {
    files.push_back(path);
  }
  for (const fs::path& file : files) corpus.push_back(F8_TRY(read_file(file)));
  return {};
}

int run(const Options& options) {
  for (const std::string& seed : options.corpus) run_one(seed);
  const auto start = std::chrono::steady_clock::now();
  uint64_t done = 0;
  const auto is_over = [&] {
    if (options.max_total_time == 0) return done >= options.runs;
    return std::chrono::steady_clock::now() - start >= std::chrono::seconds(options.max_total_time);
  };
  for (; !is_over(); ++done) {
    run_one(make_case(options.seed, options.first + done, options.corpus));
  }
  std::printf("%zu seeds and %llu cases, %llu inputs accepted\n", options.corpus.size(),
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(accepted()));
  if (accepted() > 0 || done < 1000) return 0;
  std::fprintf(stderr, "no input was accepted: the seeds do not fit the parser\n");
  return 1;
}

}  // namespace
}  // namespace f8::fuzz

int main(int argc, char** argv) {
  using namespace f8::fuzz;
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (take_option(argument, "-seed=", options.seed) ||
        take_option(argument, "-first=", options.first) ||
        take_option(argument, "-runs=", options.runs) ||
        take_option(argument, "-max_total_time=", options.max_total_time)) {
      continue;
    }
    const auto added = argument.starts_with('-') ? f8::fail(f8::ErrorCode::kInvalidArgument,
                                                            "unknown option {}", argument)
                                                 : add_corpus(argument, options.corpus);
    if (!added) {
      std::fprintf(stderr, "%s\n", added.error().message.c_str());
      return 1;
    }
  }
  if (options.corpus.empty()) options.corpus.emplace_back();
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(save_input);
  for (const int signal : {SIGABRT, SIGALRM}) std::signal(signal, on_signal);
  if (__sanitizer_set_death_callback == nullptr) {
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE}) std::signal(signal, on_signal);
  }
  return run(options);
}
