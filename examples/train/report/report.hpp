// A set of runs leaves these files in its folder, and prints the summary.
#pragma once

#include <filesystem>
#include <vector>

#include "trainer.hpp"

namespace train {

// Gives a Markdown table: each run's final smoothed loss and speed, and their ratios to the first
// run's.
[[nodiscard]] std::string summary(const std::vector<RunResult>& runs);

// Writes RECIPE.csv of the latest run, and loss.svg and summary.md of all so far.
void write_report(const std::filesystem::path& folder, const std::vector<RunResult>& runs);

}  // namespace train
