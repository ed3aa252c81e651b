// A group: subjects of one problem that are timed together, interleaved, so that what the machine
// does meanwhile (clock, power, temperature) happens to all of them alike.
//
// One round of a group is one block: every subject's batch in a random order, then all of them in
// the reverse order (for two subjects ABBA), so that a linear drift cancels within the block.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/tuner/backend/backend.hpp"
#include "tools/tuner/statistics.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuner {

struct GroupRequest {
  Problem problem;
  std::vector<Subject> subjects;
  int reference = -1;     // the subject that the others' ratios are against; -1: none
  double batch_us = 200;  // at least so long is a timed batch
  StopRule stop;          // of the ratio's interval, or without reference of the fastest median's
  // After the first round, subjects this much slower than the fastest are timed no more, and with
  // each round the limit comes nearer, so that those in front share the time. All times are then
  // given as the fastest's, times how much slower they were in their rounds. 0: none is dropped.
  double drop_above = 0;
  double warm_s = 3;  // longest warm-up of a thermal block
  uint64_t seed = 0;
};

struct SubjectOutcome {
  tuning_db::TrialResult result;
  Blocks blocks;  // ns a launch; empty where it was not timed. Not sent between processes.
};

// Told before the part of the work that could take the process down: the subject's index, or -1 for
// what concerns all.
using GroupListener = std::function<void(int subject)>;

// Measures groups on one backend, and knows when the machine must be warmed up again.
class Session {
 public:
  explicit Session(Backend& backend) : backend_(backend) {}

  // One outcome a subject, in order. An error is about the device, not about a subject.
  [[nodiscard]] Result<std::vector<SubjectOutcome>> run(const GroupRequest& request,
                                                        const GroupListener& listener = nullptr);
  // Of what the backend has open, whatever the request's problem says.
  [[nodiscard]] Result<std::vector<SubjectOutcome>> run_opened(
      const GroupRequest& request, const GroupListener& listener = nullptr);

 private:
  struct Member;
  [[nodiscard]] Status prepare(const GroupRequest& request, Member& member);
  [[nodiscard]] Status warm(int subject, double longest_s);
  [[nodiscard]] Status settle(int subject);
  [[nodiscard]] Status measure(const GroupRequest& request, std::vector<Member>& members);

  Backend& backend_;
  double busy_until_s_ = -1e9;  // when the device last worked
};

}  // namespace f8::tuner
