// sweep and resume on several GPUs.
#pragma once

#include "tools/float8-tune/sweep/sweep_job.hpp"

namespace f8::cli {

// The indices of a list "0,1", each once; empty for "all".
[[nodiscard]] Result<std::vector<int>> parse_gpus(const std::string& list);
[[nodiscard]] Result<int> measure_on_gpus(const Global& global, const SweepCommand& command);
// Merges what an earlier sweep on several GPUs left, where it is not resumed.
[[nodiscard]] Status merge_leftovers(tuning_db::Database& database, const Global& global);
// Whether the run to resume is one of several GPUs.
[[nodiscard]] Result<bool> resumes_on_gpus(const Global& global, const SweepCommand& command);

}  // namespace f8::cli
