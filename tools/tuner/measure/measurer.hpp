// Measures interleaved groups: builds and checks each candidate, sizes its batches, warms the
// device up and times the group's blocks.
#pragma once

#include <functional>
#include <vector>

#include "tools/tuner/measure/interleaved_group.hpp"

namespace f8::tuner {

// Told before each part of the work that could take the process down: the candidate's index, or -1
// where it concerns all.
using CandidateListener = std::function<void(int candidate)>;

// Works on one backend, and knows when the machine must be warmed up again.
class Measurer {
 public:
  explicit Measurer(Backend& backend) : backend_(backend) {}

  // One outcome for each candidate, in order. An error is about the device, not about a candidate.
  [[nodiscard]] Result<std::vector<CandidateOutcome>> run(
      const InterleavedGroup& group, const CandidateListener& listener = nullptr);
  // Measures candidates of what the backend has open, whatever the group's problem says.
  [[nodiscard]] Result<std::vector<CandidateOutcome>> run_opened(
      const InterleavedGroup& group, const CandidateListener& listener = nullptr);

 private:
  [[nodiscard]] Status warm(int candidate, double longest_s);
  [[nodiscard]] Status settle(int candidate);

  Backend& backend_;
  double busy_until_s_ = -1e9;  // when the device last worked
};

}  // namespace f8::tuner
