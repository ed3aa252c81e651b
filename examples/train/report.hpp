// What a set of runs leaves in its folder and prints.
#pragma once

#include <filesystem>
#include <vector>

#include "trainer.hpp"

namespace f8::train {

// A Markdown table: each run's final smoothed loss and speed, and their ratios to the first run's.
[[nodiscard]] std::string summary(const std::vector<RunResult>& runs);

// RECIPE.csv of the latest run; loss.svg and summary.md of all so far.
[[nodiscard]] Status write_report(const std::filesystem::path& folder,
                                  const std::vector<RunResult>& runs);

}  // namespace f8::train
