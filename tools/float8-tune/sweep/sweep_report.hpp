// The output of a sweep. Standard error carries progress: on a terminal one line that is rewritten,
// else one JSON object a line for each measured trial, and a heartbeat at most ten seconds apart.
// Standard output carries the results.
#pragma once

#include <string>

#include "tools/float8-tune/output.hpp"
#include "tools/tuner/search/sweep.hpp"

namespace f8::cli {

class SweepReporter {
 public:
  explicit SweepReporter(const Global& global) : global_(global), terminal_(stderr_is_terminal()) {}

  void finished(const tuning_db::TrialKey& trial, const tuning_db::TrialResult& result,
                const tuner::SweepProgress& progress);
  void tick(const tuner::SweepProgress& progress);
  void clear();  // wipes the line on the terminal

 private:
  void line(std::string text);

  const Global& global_;
  bool terminal_;
  bool shown_ = false;
  double last_s_ = 0;
};

[[nodiscard]] std::string clock_text(double s);  // "45s", "3m05"

// Prints the results, and notes on standard error what failed and what is missing.
void print_outcome(const Global& global, const std::string& run_uuid,
                   const runtime::DeviceInfo& device, const tuner::SweepOutcome& outcome);

}  // namespace f8::cli
