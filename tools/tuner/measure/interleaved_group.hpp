// An interleaved group: candidates of one problem that are timed together, so that what the machine
// does meanwhile (clock, power, temperature) happens to all of them alike.
//
// One round of a group is one block: every candidate's batch in a random order, then all of them in
// the reverse order (ABBA for two candidates), so that a linear drift cancels within the block.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "tools/tuner/backend/backend.hpp"
#include "tools/tuner/statistics.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuner {

// Measuring goes on until the interval is narrow enough or the time is spent.
struct StopRule {
  double target = 0.005;  // relative half-width of the interval
  double min_s = 0;       // at least this long
  double max_s = 1;       // and at most this long
  int min_blocks = 5;     // fewer say nothing about the spread between blocks
};
// A target that every interval meets, for groups that share a fixed time.
inline constexpr double kAnyWidth = 1e9;

struct Stop {
  bool stop = false;
  bool noisy = false;
  std::string unmet = {};  // the criterion that was not reached, in words
};
[[nodiscard]] Stop should_stop(const StopRule& rule, double elapsed_s, int blocks,
                               double relative_half_width);

// The purpose of a group's timing. A screening leaves candidates with unequal numbers of blocks and
// ratios are formed block by block, so a group is for one or the other.
struct Times {};  // each candidate's own time
struct Ratios {   // how many times faster each candidate is than one of them
  int reference = 0;
};
// The order of the candidates. After the first round, a candidate that is `drop_above` times slower
// than the front-runner is timed no more. With each round the limit comes nearer, so that those in
// front share the time; the front-runner itself always stays. Each time is then the front-runner's,
// times how much slower the candidate was in its own rounds.
struct Screening {
  double drop_above = 1.15;
};
using Purpose = std::variant<Times, Ratios, Screening>;

// The SM clock that a measurement takes place at. Steady: whatever the device runs at under this
// load; a power cap is kept, as training meets it too. Locked: the clock was fixed from outside, and
// a measurement in which it moves is noisy.
enum class ClockPolicy { kSteady, kLocked };

// The state of the machine that times are for. They are part of a method: times of unlike
// conditions are not compared.
struct Conditions {
  L2State l2 = L2State::kCold;
  ClockPolicy clock = ClockPolicy::kSteady;
};

// Their words in a method's text, which is its key in the databases: new words would be a new method.
[[nodiscard]] std::string_view rotation_text(const Conditions& conditions);
[[nodiscard]] std::string_view clock_text(const Conditions& conditions);
// Hot times are kept and shown, and decide nothing, since training does not find its operands in L2.
[[nodiscard]] std::string_view fidelity_of(const Conditions& conditions);

struct InterleavedGroup {
  Problem problem;
  std::vector<Candidate> candidates;
  Purpose purpose;
  double batch_us = 200;  // the least length of a timed batch
  StopRule stop;          // about the widest interval of a ratio, else about the fastest median's
  double warm_s = 3;      // longest warm-up of a thermal block
  uint64_t seed = 0;
  Conditions conditions{};
};

struct CandidateOutcome {
  tuning_db::TrialResult result;
  Blocks blocks;  // ns of one launch; empty where it was not timed. Not sent between processes.
};

}  // namespace f8::tuner
