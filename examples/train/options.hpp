// The command line of the program.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "config.hpp"

namespace train {

struct Options {
  std::vector<TrainConfig> runs;  // one for each recipe; all else is the same
  std::vector<std::filesystem::path> data;
  std::filesystem::path out = "train-out";
  std::filesystem::path table;  // a table of kernel choices; empty: the cost model chooses
  std::filesystem::path resume;
  int64_t save_every = 0;
  int timeout_s = 60;  // after which a rank that does not come counts as gone
  int device = 0;
  bool emulate = false;
};

// Gives nothing where the line asked for help, which is then printed. What it throws is one line.
[[nodiscard]] std::optional<Options> parse_options(int argc, const char* const* argv);

}  // namespace train
