// The loop that times a group block by block, once its candidates are built, checked and warm.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tools/tuner/measure/interleaved_group.hpp"

namespace f8::tuner {

// The device's state while a candidate's blocks were timed.
struct DeviceTally {
  int states = 0;
  double mhz_sum = 0, mhz_min = std::numeric_limits<double>::max(), power_sum = 0, temp_max = 0;
  uint64_t events = 0;

  void add(const DeviceState& state);
  void write(tuning_db::TrialResult& result) const;
};

// A candidate of the group that is being measured.
struct Member {
  Candidate candidate;
  int id = -1;  // the backend's
  CandidateOutcome outcome;
  bool timed = false;            // built and checked: takes part in rounds
  std::vector<double> relative;  // by block: its time over that of the block's fastest
  DeviceTally device;
};

class BlockLoop {
 public:
  // Takes the members that are `timed`.
  BlockLoop(Backend& backend, const InterleavedGroup& group, std::vector<Member>& members);

  [[nodiscard]] bool empty() const { return live_.empty(); }
  [[nodiscard]] int first_id() const { return live_.front()->id; }
  // Times blocks until the stop rule holds, and sets the members' results.
  [[nodiscard]] Status run();

 private:
  struct Round {
    std::vector<Member*> order;
    std::vector<double> ns;  // of each member in `order`
    DeviceState device;
  };
  [[nodiscard]] Result<Round> time_round();
  [[nodiscard]] bool is_throttled(const Round& round);
  void watch_clock(const DeviceState& device);
  void quarantine(const DeviceState& device);
  void record(const Round& round);
  void drop_slow(const Screening& screening);
  [[nodiscard]] Stop check_stop();
  [[nodiscard]] double half_width() const;
  void finish(Member& member) const;
  void judge(Member& member, double half_width) const;
  [[nodiscard]] const Member* front_runner() const;
  [[nodiscard]] const Member* reference() const;  // null: there is none, or it was not timed

  Backend& backend_;
  const InterleavedGroup& group_;
  std::vector<Member>& members_;
  std::vector<Member*> live_;  // still timed
  Random random_;
  double start_s_ = 0;
  int blocks_ = 0;
  int dropped_ = 0;
  int dropped_in_a_row_ = 0;
  int next_check_ = 0;                // the block after which the stop rule is looked at again
  std::optional<double> locked_mhz_;  // the clock of the first blocks, under ClockPolicy::kLocked
  std::string clock_moved_;           // how it moved; empty: it did not
};

}  // namespace f8::tuner
