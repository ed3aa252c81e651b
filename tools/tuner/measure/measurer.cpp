#include "tools/tuner/measure/measurer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace f8::tuner {
namespace {

using tuning_db::TrialState;

constexpr double kColdAfterS = 1.0;   // an idle gap that lets clocks and temperature fall
constexpr double kClockSlope = 0.01;  // per second
constexpr double kCoolS = 0.5;
constexpr int kMostDroppedInARow = 6;
constexpr double kManyLaunches = 4;
constexpr int kCheckResamples = 200;  // for the stop rule; the final interval takes them all
constexpr double kSettleWindowS = 0.02;
constexpr double kSettleMostS = 0.3;
constexpr double kSettled = 0.005;    // of a window's time to the one before
constexpr double kAlwaysKept = 0.02;  // slower than the fastest: not dropped however long it takes

}  // namespace

struct Session::Member {
  size_t index = 0;
  int id = -1;
  Subject subject;
  SubjectOutcome outcome;
  bool timed = false;            // prepared, takes part in rounds
  std::vector<double> relative;  // by block: its time to the fastest one's
  // Of the device while this member's blocks were timed.
  double mhz_sum = 0, mhz_min = std::numeric_limits<double>::max(), power_sum = 0, temp_max = 0;
  int states = 0;
  uint64_t events = 0;
};

Status Session::prepare(const GroupRequest& request, Member& member) {
  auto& result = member.outcome.result;
  const auto give_up = [&](TrialState state, std::string reason) {
    result.state = state;
    result.reason = std::move(reason);
    return Status{};
  };
  // An error about the subject ends the subject; one about the device ends the session.
  const auto failed = [&](const Error& error) -> Status {
    if (error.code == ErrorCode::kCuda) return std::unexpected(error);
    return give_up(error.code == ErrorCode::kCompile       ? TrialState::kCompileError
                   : error.code == ErrorCode::kUnsupported ? TrialState::kPruned
                                                           : TrialState::kLaunchError,
                   error.message);
  };

  const Result<Built> built = backend_.add(member.subject);
  if (!built) return failed(built.error());
  member.id = built->id;
  result.compile_ms = built->compile_ms;
  result.registers = built->registers;
  result.smem_bytes = built->smem_bytes;
  result.spill_bytes = built->spill_bytes;

  const Result<Check> check = backend_.verify(member.id);
  if (!check) return failed(check.error());
  result.rel_err = check->rel_err;
  result.sqnr_db = check->sqnr_db;
  if (!check->right) return give_up(TrialState::kWrong, check->what);

  const Result<double> estimate = backend_.estimate_ns(member.id);
  if (!estimate) return failed(estimate.error());
  // Single launches are slower than those of a graph, so a first batch of short ones comes out
  // short: it is timed once, and the next one has the right length.
  const double wanted_ns = request.batch_us * 1e3;
  double launch_ns = *estimate;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const double launches = std::clamp(std::ceil(wanted_ns / std::max(launch_ns, 100.0)), 1.0, 1e6);
    if (const Status batch = backend_.set_batch(member.id, static_cast<int>(launches)); !batch) {
      return failed(batch.error());
    }
    if (launches < kManyLaunches) break;
    const auto measured = backend_.time(std::array{member.id});
    if (!measured) return failed(measured.error());
    const bool long_enough = measured->front() > 0.8 * launch_ns;
    launch_ns = measured->front();
    if (long_enough) break;
  }
  member.timed = true;
  return {};
}

// Works until the SM clock has settled, at most longest_s. Only after the device was idle: within a
// thermal block the subjects before have warmed it.
Status Session::warm(int subject, double longest_s) {
  if (backend_.now_s() - busy_until_s_ < kColdAfterS) return {};
  const double start = backend_.now_s();
  double last_mhz = 0;
  double last_s = start;
  const std::array order = {subject, subject};
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

// Works until it is no longer slower from window to window. A device that did not work for some
// milliseconds runs at a clock that its power limit does not allow for long.
Status Session::settle(int subject) {
  const double start = backend_.now_s();
  const std::array order = {subject, subject};
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

Status Session::measure(const GroupRequest& request, std::vector<Member>& members) {
  std::vector<Member*> live;
  for (Member& member : members) {
    if (member.timed) live.push_back(&member);
  }
  if (live.empty()) return {};
  F8_TRY(warm(live.front()->id, request.warm_s));
  F8_TRY(settle(live.front()->id));
  (void)backend_.sample();  // what was seen before is not of this measurement

  const auto in_front = [&live] {
    return *std::ranges::min_element(live, {}, [](const Member* m) { return median(m->relative); });
  };
  Random random(request.seed);
  const double start = backend_.now_s();
  int blocks = 0;
  int dropped = 0;
  int dropped_in_a_row = 0;
  int next_check = request.stop.min_blocks;
  Stop stop;
  while (!stop.stop) {
    std::vector<Member*> turn = live;
    random.shuffle(turn);
    for (size_t i = turn.size(); i > 0; --i) turn.push_back(turn[i - 1]);
    std::vector<int> order;
    for (const Member* member : turn) order.push_back(member->id);
    const std::vector<double> times = F8_TRY(backend_.time(order));
    const DeviceState state = backend_.sample();
    const double elapsed = backend_.now_s() - start;

    if ((state.events & kDropEvents) != 0) {
      ++dropped;
      if (++dropped_in_a_row >= kMostDroppedInARow) {
        for (Member* member : live) {
          member->outcome.blocks.clear();
          member->outcome.result.state = TrialState::kQuarantined;
          member->outcome.result.clock_event_mask = static_cast<int64_t>(state.events);
          member->outcome.result.reason = fmt::format(
              "the device throttled ({}) in {} blocks in a row; check its cooling and "
              "power, then sweep again",
              describe_events(state.events), dropped_in_a_row);
        }
        return {};
      }
      backend_.sleep_s(kCoolS * dropped_in_a_row);
      continue;
    }
    dropped_in_a_row = 0;
    ++blocks;
    for (Member* member : live) member->outcome.blocks.emplace_back();
    for (size_t i = 0; i < turn.size(); ++i) {
      turn[i]->outcome.blocks.back().push_back(times[i]);
    }
    const auto latest = [](const Member* member) { return mean(member->outcome.blocks.back()); };
    const double fastest_ns = latest(*std::ranges::min_element(live, {}, latest));
    for (Member* member : live) {
      member->relative.push_back(latest(member) / fastest_ns);
      if (state.samples == 0) continue;
      ++member->states;
      member->mhz_sum += state.sm_mhz_mean;
      member->mhz_min = std::min(member->mhz_min, state.sm_mhz_min);
      member->power_sum += state.power_w;
      member->temp_max = std::max(member->temp_max, state.temp_c);
      member->events |= state.events;
    }

    if (request.drop_above > 0) {
      const double kept = 1 + std::max((request.drop_above - 1) / blocks, kAlwaysKept);
      std::erase_if(live, [&](const Member* m) { return median(m->relative) > kept; });
    }
    if (blocks < next_check && elapsed < request.stop.max_s) continue;
    next_check = blocks + std::max(1, blocks / 4);
    double half_width = 0;
    if (request.reference >= 0) {
      const Member& reference = members[static_cast<size_t>(request.reference)];
      for (const Member* member : live) {
        if (!reference.timed || member == &reference) continue;
        const PairedRatio ratio = paired_ratio(member->outcome.blocks, reference.outcome.blocks,
                                               request.seed, kCheckResamples);
        half_width = std::max(half_width, ratio.ci.relative_half_width(ratio.ratio));
      }
    } else {
      const Member* fastest = in_front();
      const Summary summary = summarize(fastest->outcome.blocks, request.seed, kCheckResamples);
      half_width = summary.ci.relative_half_width(summary.median);
    }
    stop = should_stop(request.stop, elapsed, blocks, half_width);
  }
  busy_until_s_ = backend_.now_s();
  const Member& fastest = *in_front();

  for (Member& member : members) {
    if (!member.timed || member.outcome.blocks.empty()) continue;
    auto& result = member.outcome.result;
    Summary summary = summarize(member.outcome.blocks, request.seed);
    if (request.drop_above > 0) {
      // Its blocks are fewer than others', and of another clock: what counts is its place in them.
      const double level = summarize(fastest.outcome.blocks, request.seed, 1).median;
      summary.scale(level * median(member.relative) / median(fastest.relative) / summary.median);
    }
    result.timing = tuning_db::Timing{.n = summary.n,
                                      .n_dropped = dropped,
                                      .median_ns = summary.median,
                                      .mad_ns = summary.mad,
                                      .p05_ns = summary.p05,
                                      .p95_ns = summary.p95,
                                      .ci_lo_ns = summary.ci.lo,
                                      .ci_hi_ns = summary.ci.hi};
    if (member.states > 0) {
      result.sm_mhz_mean = member.mhz_sum / member.states;
      result.sm_mhz_min = member.mhz_min;
      result.power_w = member.power_sum / member.states;
      result.temp_c = member.temp_max;
      result.clock_event_mask = static_cast<int64_t>(member.events);
    }
    // Judged one by one, not by the group's last check: the group may have stopped for another.
    double half_width = summary.ci.relative_half_width(summary.median);
    if (request.reference >= 0 && members[static_cast<size_t>(request.reference)].timed) {
      const Member& reference = members[static_cast<size_t>(request.reference)];
      if (&member != &reference &&
          member.outcome.blocks.size() == reference.outcome.blocks.size()) {
        const PairedRatio ratio =
            paired_ratio(member.outcome.blocks, reference.outcome.blocks, request.seed);
        result.ratio = tuning_db::Ratio{
            .pair_uuid = "", .ratio = ratio.ratio, .lo = ratio.ci.lo, .hi = ratio.ci.hi};
        half_width = ratio.ci.relative_half_width(ratio.ratio);
      } else if (&member == &reference) {
        half_width = 0;  // its part in the ratios is judged there
      }
    }
    const int own_blocks = static_cast<int>(member.outcome.blocks.size());
    const Stop own = should_stop({.target = request.stop.target,
                                  .min_s = 0,
                                  .max_s = 0,
                                  .min_blocks = std::min(request.stop.min_blocks, blocks)},
                                 backend_.now_s() - start, own_blocks, half_width);
    result.state = own.noisy ? TrialState::kNoisy : TrialState::kOk;
    result.reason = own.unmet;
  }
  return {};
}

Result<std::vector<SubjectOutcome>> Session::run(const GroupRequest& request,
                                                 const GroupListener& listener) {
  if (listener) listener(-1);
  F8_TRY(backend_.open(request.problem));
  return run_opened(request, listener);
}

Result<std::vector<SubjectOutcome>> Session::run_opened(const GroupRequest& request,
                                                        const GroupListener& listener) {
  const auto tell = [&](int subject) {
    if (listener) listener(subject);
  };
  std::vector<Member> members(request.subjects.size());
  for (size_t i = 0; i < members.size(); ++i) {
    members[i].index = i;
    members[i].subject = request.subjects[i];
    tell(static_cast<int>(i));
    F8_TRY(prepare(request, members[i]));
  }
  // Alone, a subject can be blamed for what happens while it is timed.
  tell(members.size() == 1 ? 0 : -1);
  F8_TRY(measure(request, members));
  std::vector<SubjectOutcome> outcomes;
  for (Member& member : members) outcomes.push_back(std::move(member.outcome));
  return outcomes;
}

}  // namespace f8::tuner
