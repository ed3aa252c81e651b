// The output of a sweep. Standard error carries progress: on a terminal one line that is rewritten,
// else such a line at most every ten seconds; or, where it is asked for, a JSON object a line for each
// measured trial and for each heartbeat. Standard output carries the results.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "tools/float8-tune/output.hpp"
#include "tools/tuner/search/sweep.hpp"

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
                const tuner::SweepProgress& progress);
  void tick(const tuner::SweepProgress& progress);
  void clear();  // wipes the line on the terminal

 private:
  void line(std::string text);

  ProgressMode mode_;
  std::FILE* out_;
  bool terminal_;
  bool shown_ = false;
  std::optional<double> last_s_;
};

[[nodiscard]] std::string clock_text(double s);  // "45s", "3m05"

// Prints the results, and notes on standard error what failed and what is missing.
void print_outcome(const Global& global, const std::string& run_uuid,
                   const runtime::DeviceInfo& device, const tuner::SweepOutcome& outcome);

}  // namespace f8::cli
