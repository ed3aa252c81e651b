#include "tools/tuner/measure/measurer.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "tools/tuner/measure/block_loop.hpp"

namespace f8::tuner {
namespace {

using tuning_db::TrialState;

constexpr double kColdAfterS = 1.0;   // an idle gap that lets clocks and temperature fall
constexpr double kClockSlope = 0.01;  // per second
constexpr double kManyLaunches = 4;
constexpr double kSettleWindowS = 0.02;
constexpr double kSettleMostS = 0.3;
constexpr double kSettled = 0.005;  // how much slower than the window before is still settled

// Sizes the candidate's batch. Single launches are slower than those of a graph, so the first batch
// of a short kernel comes out short: it is timed once, and the next one has the right length.
Status size_batch(Backend& backend, int id, double batch_us) {
  double launch_ns = F8_TRY(backend.estimate_ns(id));
  for (int attempt = 0; attempt < 2; ++attempt) {
    const double launches =
        std::clamp(std::ceil(batch_us * 1e3 / std::max(launch_ns, 100.0)), 1.0, 1e6);
    F8_TRY(backend.set_batch(id, static_cast<int>(launches)));
    if (launches < kManyLaunches) break;
    const double measured_ns = F8_TRY(backend.time(std::array{id})).front();
    const bool long_enough = measured_ns > 0.8 * launch_ns;
    launch_ns = measured_ns;
    if (long_enough) break;
  }
  return {};
}

// Builds and checks the member; its state says so where the result is wrong.
Status build(Backend& backend, Member& member, double batch_us) {
  tuning_db::TrialResult& result = member.outcome.result;
  const Built built = F8_TRY(backend.add(member.candidate));
  member.id = built.id;
  result.compile_ms = built.compile_ms;
  result.registers = built.registers;
  result.smem_bytes = built.smem_bytes;
  result.spill_bytes = built.spill_bytes;

  const Check check = F8_TRY(backend.verify(member.id));
  result.rel_err = check.rel_err;
  result.sqnr_db = check.sqnr_db;
  if (!check.right) {
    result.state = TrialState::kWrong;
    result.reason = check.what;
    return {};
  }
  F8_TRY(size_batch(backend, member.id, batch_us));
  member.timed = true;
  return {};
}

// An error about the candidate ends the candidate; one about the device ends the group.
Status prepare(Backend& backend, Member& member, double batch_us) {
  const Status built = build(backend, member, batch_us);
  if (built) return {};
  const Error& error = built.error();
  if (error.code == ErrorCode::kCuda) return std::unexpected(error);
  member.outcome.result.state = error.code == ErrorCode::kCompile       ? TrialState::kCompileError
                                : error.code == ErrorCode::kUnsupported ? TrialState::kPruned
                                                                        : TrialState::kLaunchError;
  member.outcome.result.reason = error.message;
  return {};
}

}  // namespace

// Works until the SM clock has settled, at most longest_s, where the device was idle before. Within
// a thermal block the candidates before have warmed it.
Status Measurer::warm(int candidate, double longest_s) {
  if (backend_.now_s() - busy_until_s_ < kColdAfterS) return {};
  const double start = backend_.now_s();
  double last_mhz = 0;
  double last_s = start;
  const std::array order = {candidate, candidate};
  while (backend_.now_s() - start < longest_s) {
    F8_TRY(backend_.time(order));
    if (backend_.now_s() - last_s < 0.2) continue;
    const DeviceState state = backend_.sample();
    const double now = backend_.now_s();
    if (state.samples > 0) {
      const double slope = std::abs(state.sm_mhz_mean / last_mhz - 1) / (now - last_s);
      if (last_mhz > 0 && slope < kClockSlope) break;
      last_mhz = state.sm_mhz_mean;
    }
    last_s = now;
  }
  return {};
}

// Works until the candidate is no longer slower from window to window. A device that has not worked
// for some milliseconds runs at a clock that its power limit does not allow for long.
Status Measurer::settle(int candidate) {
  const double start = backend_.now_s();
  const std::array order = {candidate, candidate};
  double before = 0;
  for (double window = start; window - start < kSettleMostS; window = backend_.now_s()) {
    double sum = 0;
    int count = 0;
    while (count == 0 || backend_.now_s() - window < kSettleWindowS) {
      for (const double ns : F8_TRY(backend_.time(order))) sum += ns;
      count += 2;
    }
    const double mean = sum / count;
    if (before > 0 && mean < before * (1 + kSettled)) break;
    before = mean;
  }
  return {};
}

Result<std::vector<CandidateOutcome>> Measurer::run(const InterleavedGroup& group,
                                                    const CandidateListener& listener) {
  if (listener) listener(-1);
  F8_TRY(backend_.open(group.problem, group.conditions.l2));
  return run_opened(group, listener);
}

Result<std::vector<CandidateOutcome>> Measurer::run_opened(const InterleavedGroup& group,
                                                           const CandidateListener& listener) {
  const auto tell = [&](int candidate) {
    if (listener) listener(candidate);
  };
  std::vector<Member> members(group.candidates.size());
  for (size_t i = 0; i < members.size(); ++i) {
    members[i].candidate = group.candidates[i];
    tell(static_cast<int>(i));
    F8_TRY(prepare(backend_, members[i], group.batch_us));
  }
  // A candidate that is alone can be blamed for what happens while it is timed.
  tell(members.size() == 1 ? 0 : -1);
  BlockLoop loop(backend_, group, members);
  if (!loop.empty()) {
    F8_TRY(warm(loop.first_id(), group.warm_s));
    F8_TRY(settle(loop.first_id()));
    (void)backend_.sample();  // what was seen before is not of this measurement
    F8_TRY(loop.run());
    busy_until_s_ = backend_.now_s();
  }
  std::vector<CandidateOutcome> outcomes;
  for (Member& member : members) outcomes.push_back(std::move(member.outcome));
  return outcomes;
}

}  // namespace f8::tuner
