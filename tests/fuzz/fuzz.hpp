// Deterministic mutation fuzzing: case i of a seed is the same text on every machine, so a failure
// names the command that repeats it alone.
//
//   fuzz_parsers [--seed=N] [--first=N] [--iterations=N] [GoogleTest flags]
//
// A case is one of the corpus's texts after a few random edits: bytes changed, taken out, repeated,
// numbers made extreme, pieces of other texts spliced in.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <string_view>

namespace f8::fuzz {

struct Options {
  uint64_t seed = 1;
  uint64_t first = 0;
  uint64_t iterations = 40'000;
};
[[nodiscard]] Options& options();

// `check` runs within the current GoogleTest test on every case; it stops at the first failure.
void run(std::span<const std::string> corpus,
         const std::function<void(std::string_view text)>& check);

// Every parser promises this of a message: it is one printable line, not endless.
void expect_readable(const std::string& message);

}  // namespace f8::fuzz
