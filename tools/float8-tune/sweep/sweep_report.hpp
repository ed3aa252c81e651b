// The output of a sweep. Standard error carries progress: on a terminal one line that is rewritten,
// else such a line at most every ten seconds, with one more for each GPU where there are several; or, where it is asked for, a JSON object a line for each
// measured trial and for each heartbeat. Standard output carries the results.
#pragma once

#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/float8-tune/output.hpp"
#include "tools/tuner/gpus/gpus_sweep.hpp"

namespace f8::cli {

enum class ProgressMode { kLine, kJson, kNone };
// auto, line, json or none; "auto" is json beside --json.
[[nodiscard]] ProgressMode progress_mode(std::string_view text, const Global& global);

class SweepReporter {
 public:
  explicit SweepReporter(ProgressMode mode, std::FILE* out = stderr,
                         bool terminal = stderr_is_terminal())
      : mode_(mode), out_(out), terminal_(terminal) {}

  void finished(const tuning_db::TrialKey& trial, const tuning_db::TrialResult& result,
                const tuner::SweepProgress& progress, std::optional<int> gpu = {});
  void tick(const tuner::SweepProgress& progress);
  void tick(const tuner::GpusProgress& progress);
  void clear();  // wipes the lines on the terminal

 private:
  [[nodiscard]] bool rewrites() const { return terminal_ && mode_ == ProgressMode::kLine; }
  [[nodiscard]] bool is_due();
  void line(std::string text);
  void rewrite(const std::vector<std::string>& lines);

  ProgressMode mode_;
  std::FILE* out_;
  bool terminal_;
  size_t shown_ = 0;  // lines on the terminal
  std::optional<double> last_s_;
};

[[nodiscard]] std::string clock_text(double s);  // "45s", "3m05"

// Prints the results, and notes on standard error what failed and what is missing. `gpus`: of a sweep
// on several.
void print_outcome(const Global& global, const std::string& run_uuid,
                   const runtime::DeviceInfo& device, const tuner::SweepOutcome& outcome,
                   std::span<const tuner::GpuProgress> gpus = {});

}  // namespace f8::cli
