#include "tools/tuner/measure/block_loop.hpp"

#include <algorithm>
#include <cmath>

namespace f8::tuner {
namespace {

using tuning_db::TrialState;

constexpr double kCoolS = 0.5;
constexpr int kMostDroppedInARow = 6;
constexpr int kCheckResamples = 200;  // for the stop rule; the final interval takes them all
constexpr double kSameMhz = 1;        // NVML gives whole MHz; its steps are 15
constexpr double kAlwaysKept = 0.02;  // a candidate no slower than this stays in a screening

}  // namespace

void DeviceTally::add(const DeviceState& state) {
  if (state.samples == 0) return;
  ++states;
  mhz_sum += state.sm_mhz_mean;
  mhz_min = std::min(mhz_min, state.sm_mhz_min);
  power_sum += state.power_w;
  temp_max = std::max(temp_max, state.temp_c);
  events |= state.events;
}

void DeviceTally::write(tuning_db::TrialResult& result) const {
  if (states == 0) return;
  result.sm_mhz_mean = mhz_sum / states;
  result.sm_mhz_min = mhz_min;
  result.power_w = power_sum / states;
  result.temp_c = temp_max;
  result.clock_event_mask = static_cast<int64_t>(events);
}

BlockLoop::BlockLoop(Backend& backend, const InterleavedGroup& group, std::vector<Member>& members)
    : backend_(backend),
      group_(group),
      members_(members),
      random_(group.seed),
      next_check_(group.stop.min_blocks) {
  for (Member& member : members) {
    if (member.timed) live_.push_back(&member);
  }
}

Status BlockLoop::run() {
  start_s_ = backend_.now_s();
  for (Stop stop; !stop.stop;) {
    const Round round = F8_TRY(time_round());
    if (is_throttled(round)) {
      if (dropped_in_a_row_ >= kMostDroppedInARow) {
        quarantine(round.device);
        return {};
      }
      backend_.sleep_s(kCoolS * dropped_in_a_row_);
      continue;
    }
    record(round);
    watch_clock(round.device);
    if (!clock_moved_.empty()) break;
    if (const auto* screening = std::get_if<Screening>(&group_.purpose)) drop_slow(*screening);
    stop = check_stop();
  }
  if (group_.conditions.clock == ClockPolicy::kLocked && !locked_mhz_) {
    clock_moved_ = "--clock locked: NVML gives no SM clock here; measure with --clock steady";
  }
  for (Member& member : members_) {
    if (member.timed) finish(member);
  }
  return {};
}

Result<BlockLoop::Round> BlockLoop::time_round() {
  Round round{.order = live_, .ns = {}, .device = {}};
  random_.shuffle(round.order);
  for (size_t i = round.order.size(); i > 0; --i) round.order.push_back(round.order[i - 1]);
  std::vector<int> ids;
  for (const Member* member : round.order) ids.push_back(member->id);
  round.ns = F8_TRY(backend_.time(ids));
  round.device = backend_.sample();
  return round;
}

// Counts a round that must be dropped because the device was not fit.
bool BlockLoop::is_throttled(const Round& round) {
  const bool throttled = (round.device.events & kDropEvents) != 0;
  dropped_in_a_row_ = throttled ? dropped_in_a_row_ + 1 : 0;
  dropped_ += throttled ? 1 : 0;
  return throttled;
}

// Under a locked clock every sample shows the clock of the first one.
void BlockLoop::watch_clock(const DeviceState& device) {
  if (group_.conditions.clock != ClockPolicy::kLocked || device.samples == 0) return;
  if (!locked_mhz_) locked_mhz_ = device.sm_mhz_mean;
  const auto moved = [&](double mhz) { return std::abs(mhz - *locked_mhz_); };
  const double furthest = std::max(device.sm_mhz_min, device.sm_mhz_mean,
                                   [&](double a, double b) { return moved(a) < moved(b); });
  if (moved(furthest) < kSameMhz) return;
  const uint64_t events = device.events & ~kEventIdle;
  clock_moved_ = f8::format(
      "--clock locked: the SM clock went from {:.0f} to {:.0f} MHz{}; lock it lower from outside "
      "(nvidia-smi --lock-gpu-clocks), or measure with --clock steady",
      *locked_mhz_, furthest, events == 0 ? "" : " (" + describe_events(events) + ")");
}

void BlockLoop::quarantine(const DeviceState& device) {
  for (Member& member : members_) {
    if (!member.timed) continue;
    member.outcome.blocks.clear();
    tuning_db::TrialResult& result = member.outcome.result;
    result.state = TrialState::kQuarantined;
    result.clock_event_mask = static_cast<int64_t>(device.events);
    result.reason = f8::format(
        "the device throttled ({}) in {} blocks in a row; check its cooling and "
        "power, then sweep again",
        describe_events(device.events), dropped_in_a_row_);
  }
}

void BlockLoop::record(const Round& round) {
  ++blocks_;
  for (Member* member : live_) member->outcome.blocks.emplace_back();
  for (size_t i = 0; i < round.order.size(); ++i) {
    round.order[i]->outcome.blocks.back().push_back(round.ns[i]);
  }
  const auto latest = [](const Member* member) { return mean(member->outcome.blocks.back()); };
  const double fastest_ns = latest(*std::ranges::min_element(live_, {}, latest));
  for (Member* member : live_) {
    member->relative.push_back(latest(member) / fastest_ns);
    member->device.add(round.device);
  }
}

// The limit is relative to the front-runner, not to each block's fastest: with noise a candidate is
// seldom the fastest of a block, and all of them can be behind that.
void BlockLoop::drop_slow(const Screening& screening) {
  const double limit = (1 + std::max((screening.drop_above - 1) / blocks_, kAlwaysKept)) *
                       median(front_runner()->relative);
  std::erase_if(live_, [&](const Member* member) { return median(member->relative) > limit; });
}

Stop BlockLoop::check_stop() {
  const double elapsed = backend_.now_s() - start_s_;
  if (blocks_ < next_check_ && elapsed < group_.stop.max_s) return {};
  next_check_ = blocks_ + std::max(1, blocks_ / 4);
  return should_stop(group_.stop, elapsed, blocks_, half_width());
}

// The relative half-width that the group's stop rule is about.
double BlockLoop::half_width() const {
  if (!std::holds_alternative<Ratios>(group_.purpose)) {
    const Summary summary = summarize(front_runner()->outcome.blocks, group_.seed, kCheckResamples);
    return summary.ci.relative_half_width(summary.median);
  }
  double widest = 0;
  const Member* other = reference();
  for (const Member* member : live_) {
    if (other == nullptr || member == other) continue;
    const PairedRatio ratio =
        paired_ratio(member->outcome.blocks, other->outcome.blocks, group_.seed, kCheckResamples);
    widest = std::max(widest, ratio.ci.relative_half_width(ratio.ratio));
  }
  return widest;
}

void BlockLoop::finish(Member& member) const {
  tuning_db::TrialResult& result = member.outcome.result;
  Summary summary = summarize(member.outcome.blocks, group_.seed);
  if (std::holds_alternative<Screening>(group_.purpose)) {
    // Its blocks are fewer than the front-runner's and of another clock, so its time follows from
    // how much slower it was in them.
    const Member& front = *front_runner();
    const double level = summarize(front.outcome.blocks, group_.seed, 1).median;
    summary.scale(level * median(member.relative) / median(front.relative) / summary.median);
  }
  result.timing = tuning_db::Timing{.n = summary.n,
                                    .n_dropped = dropped_,
                                    .median_ns = summary.median,
                                    .mad_ns = summary.mad,
                                    .p05_ns = summary.p05,
                                    .p95_ns = summary.p95,
                                    .ci_lo_ns = summary.ci.lo,
                                    .ci_hi_ns = summary.ci.hi};
  member.device.write(result);
  double half_width = summary.ci.relative_half_width(summary.median);
  if (const Member* other = reference(); other == &member) {
    half_width = 0;  // its part in the ratios is judged there
  } else if (other != nullptr) {
    const PairedRatio ratio =
        paired_ratio(member.outcome.blocks, other->outcome.blocks, group_.seed);
    result.ratio = tuning_db::Ratio{
        .pair_uuid = "", .ratio = ratio.ratio, .lo = ratio.ci.lo, .hi = ratio.ci.hi};
    half_width = ratio.ci.relative_half_width(ratio.ratio);
  }
  judge(member, half_width);
}

// Each member is judged by its own interval: the group may have stopped for another's.
void BlockLoop::judge(Member& member, double half_width) const {
  const Stop own = should_stop({.target = group_.stop.target,
                                .min_s = 0,
                                .max_s = 0,
                                .min_blocks = std::min(group_.stop.min_blocks, blocks_)},
                               backend_.now_s() - start_s_,
                               static_cast<int>(member.outcome.blocks.size()), half_width);
  const bool moved = !clock_moved_.empty();
  member.outcome.result.state = moved || own.noisy ? TrialState::kNoisy : TrialState::kOk;
  member.outcome.result.reason = moved ? clock_moved_ : own.unmet;
}

const Member* BlockLoop::front_runner() const {
  return *std::ranges::min_element(live_, {}, [](const Member* m) { return median(m->relative); });
}

const Member* BlockLoop::reference() const {
  const auto* ratios = std::get_if<Ratios>(&group_.purpose);
  if (ratios == nullptr) return nullptr;
  const Member& member = members_[static_cast<size_t>(ratios->reference)];
  return member.timed ? &member : nullptr;
}

}  // namespace f8::tuner
