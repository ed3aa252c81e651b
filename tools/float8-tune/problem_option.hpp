// The program takes what it prints: a problem by its key, a generated kernel by the text of a
// candidate.
#pragma once

#include <optional>
#include <string>

#include "codegen/kernel_spec.hpp"
#include "recipes/problem.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"

namespace f8::cli {

// The options that a problem key stands for; those that a command lacks are null.
struct ProblemOptions {
  std::string* mnk = nullptr;
  std::string* recipe = nullptr;
  std::string* op = nullptr;  // without it any operation stands for its linear
  bool* fast = nullptr;       // without both, the accumulation must be the recipe's
  bool* precise = nullptr;
  GroupOptions* groups = nullptr;           // without them there are no experts
  std::optional<Problem>* whole = nullptr;  // without it there is no attention and no MLP
};

// --problem KEY, instead of --mnk, --recipe and --op, of which the command has some already.
CLI::Option* add_problem(CLI::App& command, const ProblemOptions& options);

// Fails where neither --problem nor both --mnk and --recipe are given.
[[nodiscard]] Status require_problem(const std::string& mnk, const std::string& recipe);

// The user's database, for a command line that someone is told to run; without one a name for it.
[[nodiscard]] std::string database_to_write(const Global& global);

// A key whose problem is the one that its recipe has at this shape.
[[nodiscard]] Result<Problem> parse_problem(std::string_view key, bool any_accumulation = false);

// A GEMM's configuration, as "128x256s4c2x1w2g8" or as a candidate is printed:
// "generated 128x256s4c2x1w2g8", "generated:128x256s4c2x1w2g8".
[[nodiscard]] Result<GemmConfig> parse_config(std::string_view text);

}  // namespace f8::cli
