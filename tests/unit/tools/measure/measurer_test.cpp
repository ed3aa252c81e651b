#include "tools/tuner/measure/measurer.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/tools/fake_backend.hpp"

namespace f8::tuner {
namespace {

using tuning_db::TrialState;

Candidate generated(const char* config) {
  return {.impl = Impl::kGenerated, .config = config};
}

InterleavedGroup pair_group() {
  InterleavedGroup group;
  group.problem = test_problem();
  group.candidates = {generated("fast"), generated("slow")};
  group.purpose = Ratios{.reference = 1};
  group.stop = {.target = 0.005, .min_s = 0.05, .max_s = 1, .min_blocks = 6};
  group.warm_s = 0.5;
  group.seed = 11;
  return group;
}

double fast_and_slow(const Problem&, const Candidate& candidate, double) {
  return candidate.config == "fast" ? 100e3 : 150e3;
}

TEST(Measurer, RecoversAKnownRatioUnderDrift) {
  FakeMachine machine;
  // The clock falls by a quarter over the first second.
  machine.ns = [](const Problem& p, const Candidate& s, double now) {
    return fast_and_slow(p, s, now) * (1 + 0.25 * std::min(now, 2.0));
  };
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  group.stop.min_s = 0.8;
  const auto outcomes = Measurer(backend).run(group);
  ASSERT_TRUE(outcomes) << outcomes.error().message;
  const auto& result = outcomes->front().result;
  ASSERT_EQ(result.state, TrialState::kOk) << result.reason;
  ASSERT_TRUE(result.ratio);
  EXPECT_NEAR(result.ratio->ratio, 1.5, 0.005);
  EXPECT_LE(result.ratio->lo, 1.5);
  EXPECT_GE(result.ratio->hi, 1.5 - 1e-3);
  EXPECT_EQ(result.rel_err, 0.002);
  EXPECT_EQ(result.registers, 168);
  EXPECT_EQ(result.sm_mhz_mean, 1700);
  EXPECT_FALSE((*outcomes)[1].result.ratio) << "the reference has no ratio to itself";
}

TEST(Measurer, AScreeningRanksUnderDrift) {
  FakeMachine machine;
  // The clock falls by a sixth over the first half second; candidate number i takes i % more.
  machine.ns = [](const Problem&, const Candidate& s, double now) {
    return 1e6 * (1 + 0.01 * std::stod(s.config)) * (1 + 0.2 * std::min(now, 0.5) / 0.5);
  };
  machine.noise = 0.01;
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  group.candidates.clear();
  for (const char* slower : {"12", "5", "0", "3", "25", "8", "30", "4", "16", "7"}) {
    group.candidates.push_back(generated(slower));
  }
  group.stop = {.target = kAnyWidth, .min_s = 0.4, .max_s = 0.4, .min_blocks = 1};
  group.purpose = Screening{.drop_above = 1.15};
  const auto outcomes = Measurer(backend).run(group);
  ASSERT_TRUE(outcomes) << outcomes.error().message;
  const double fastest = (*outcomes)[2].result.timing->median_ns;
  EXPECT_NEAR(fastest, 1.2e6, 0.02e6) << "not settled";
  for (size_t i = 0; i < outcomes->size(); ++i) {
    const auto& timing = (*outcomes)[i].result.timing;
    ASSERT_TRUE(timing);
    EXPECT_NEAR(timing->median_ns / fastest, 1 + 0.01 * std::stod(group.candidates[i].config),
                0.015);
    EXPECT_LE(timing->ci_lo_ns, timing->median_ns);
    EXPECT_GE(timing->ci_hi_ns, timing->median_ns);
  }
  EXPECT_GT((*outcomes)[2].blocks.size(), 3 * (*outcomes)[6].blocks.size())
      << "the one in front has most of the time";
}

TEST(Measurer, SaysNoisyAndWhy) {
  FakeMachine machine;
  machine.ns = fast_and_slow;
  machine.noise = 0.3;
  FakeBackend backend(machine);
  const auto outcomes = Measurer(backend).run(pair_group());
  ASSERT_TRUE(outcomes);
  const auto& result = outcomes->front().result;
  EXPECT_EQ(result.state, TrialState::kNoisy);
  EXPECT_NE(result.reason.find("half-width"), std::string::npos) << result.reason;
  EXPECT_TRUE(result.timing);
}

TEST(Measurer, TheOperandSetsAreAsTheGroupSays) {
  FakeMachine machine;
  machine.ns = fast_and_slow;
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  ASSERT_TRUE(Measurer(backend).run(group));
  group.conditions.l2 = L2State::kHot;
  ASSERT_TRUE(Measurer(backend).run(group));
  EXPECT_EQ(backend.opened, (std::vector<L2State>{L2State::kCold, L2State::kHot}));
}

TEST(Measurer, ALockedClockThatMovesIsNoisyAndSaysSo) {
  FakeMachine machine;
  machine.ns = fast_and_slow;
  // One step of the clock, long after the warm-up.
  machine.sm_mhz = [](double now) { return now < 0.8 ? 1500.0 : 1485.0; };
  machine.events = [](double now) { return now < 0.8 ? kEventIdle : kEventSwPowerCap; };
  machine.noise = 0.05;
  InterleavedGroup group = pair_group();
  FakeBackend steady(machine);
  EXPECT_EQ(Measurer(steady).run(group)->front().result.reason.find("locked"), std::string::npos);

  group.conditions.clock = ClockPolicy::kLocked;
  FakeBackend locked(machine);
  const auto outcomes = Measurer(locked).run(group);
  ASSERT_TRUE(outcomes);
  for (const CandidateOutcome& outcome : *outcomes) {
    EXPECT_EQ(outcome.result.state, TrialState::kNoisy);
    EXPECT_NE(outcome.result.reason.find("from 1500 to 1485 MHz"), std::string::npos)
        << outcome.result.reason;
    EXPECT_NE(outcome.result.reason.find(describe_events(kEventSwPowerCap)), std::string::npos)
        << outcome.result.reason;
    EXPECT_TRUE(outcome.result.timing);
  }
  EXPECT_LT(locked.now_s(), 0.9) << "what is noisy anyway is measured no longer";
}

TEST(Measurer, ALockedClockThatStaysIsMeasuredAsAlways) {
  FakeMachine machine;
  machine.ns = fast_and_slow;
  machine.sm_mhz = [](double) { return 1500.0; };
  InterleavedGroup group = pair_group();
  group.conditions.clock = ClockPolicy::kLocked;
  FakeBackend backend(machine);
  const auto outcomes = Measurer(backend).run(group);
  ASSERT_TRUE(outcomes);
  EXPECT_EQ(outcomes->front().result.state, TrialState::kOk) << outcomes->front().result.reason;
}

TEST(Measurer, ALockedClockThatNobodySeesIsNoisy) {
  FakeMachine machine;
  machine.ns = fast_and_slow;
  machine.samples = 0;
  InterleavedGroup group = pair_group();
  group.conditions.clock = ClockPolicy::kLocked;
  FakeBackend backend(machine);
  const auto outcomes = Measurer(backend).run(group);
  ASSERT_TRUE(outcomes);
  EXPECT_EQ(outcomes->front().result.state, TrialState::kNoisy);
  EXPECT_NE(outcomes->front().result.reason.find("no SM clock"), std::string::npos)
      << outcomes->front().result.reason;
}

TEST(Measurer, StopsEarlyWhenQuiet) {
  FakeMachine quiet;
  quiet.ns = fast_and_slow;
  quiet.noise = 1e-4;
  FakeBackend backend(quiet);
  ASSERT_TRUE(Measurer(backend).run(pair_group()));
  EXPECT_LT(backend.now_s(), 0.5 + 0.2);  // warm-up, then little more than the least time
}

TEST(Measurer, AWrongCandidateIsNeverTimed) {
  FakeMachine machine;
  machine.ns = [](const Problem&, const Candidate& s, double) {
    return s.config == "wrong" ? 1e3 : 100e3;
  };
  machine.misbehaviour = [](const Problem&, const Candidate& s) {
    return s.config == "wrong" ? Misbehaviour::kWrong : Misbehaviour::kNone;
  };
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  group.purpose = Times{};
  group.candidates = {generated("wrong"), generated("right")};
  const auto outcomes = Measurer(backend).run(group);
  ASSERT_TRUE(outcomes);
  EXPECT_EQ((*outcomes)[0].result.state, TrialState::kWrong);
  EXPECT_NE((*outcomes)[0].result.reason.find("want 2"), std::string::npos);
  EXPECT_FALSE((*outcomes)[0].result.timing);
  EXPECT_EQ((*outcomes)[1].result.state, TrialState::kOk);
  EXPECT_EQ(backend.timed, (std::set<std::string>{"right"}));
}

TEST(Measurer, ARefusedCandidateCostsItselfAlone) {
  FakeMachine machine;
  machine.misbehaviour = [](const Problem&, const Candidate& s) {
    return s.config == "a"   ? Misbehaviour::kUnsupported
           : s.config == "b" ? Misbehaviour::kCompile
                             : Misbehaviour::kNone;
  };
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  group.purpose = Times{};
  group.candidates = {generated("a"), generated("b"), generated("c")};
  const auto outcomes = Measurer(backend).run(group);
  ASSERT_TRUE(outcomes);
  EXPECT_EQ((*outcomes)[0].result.state, TrialState::kPruned);
  EXPECT_EQ((*outcomes)[1].result.state, TrialState::kCompileError);
  EXPECT_EQ((*outcomes)[1].result.reason, "C7510 serialised wgmma");
  EXPECT_EQ((*outcomes)[2].result.state, TrialState::kOk);
}

TEST(Measurer, ABrokenDeviceEndsTheGroup) {
  FakeMachine machine;
  machine.misbehaviour = [](const Problem&, const Candidate& s) {
    return s.config == "b" ? Misbehaviour::kSticky : Misbehaviour::kNone;
  };
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  group.candidates = {generated("a"), generated("b")};
  std::vector<int> begun;
  const auto outcomes = Measurer(backend).run(group, [&](int i) { begun.push_back(i); });
  ASSERT_FALSE(outcomes);
  EXPECT_EQ(outcomes.error().code, ErrorCode::kCuda);
  EXPECT_EQ(begun.back(), 1) << "the parent must know whom to blame";
}

TEST(Measurer, ThrottledBlocksAreDropped) {
  FakeMachine machine;
  // Between 0.60 and 0.62 s the device is thermally slowed to half its speed.
  const auto hot = [](double now) { return now > 0.60 && now < 0.62; };
  machine.ns = [hot](const Problem& p, const Candidate& s, double now) {
    return fast_and_slow(p, s, now) * (hot(now) ? 2 : 1);
  };
  machine.events = [hot](double now) { return hot(now) ? kEventHwThermal : kEventSwPowerCap; };
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  group.stop.min_s = 0.5;
  const auto outcomes = Measurer(backend).run(group);
  ASSERT_TRUE(outcomes);
  const auto& result = outcomes->front().result;
  ASSERT_TRUE(result.timing);
  EXPECT_GE(result.timing->n_dropped, 1);
  EXPECT_NEAR(result.timing->median_ns, 100e3, 1e3);
  EXPECT_LT(result.timing->p95_ns, 110e3) << "a throttled batch was kept";
  EXPECT_EQ(result.clock_event_mask, static_cast<int64_t>(kEventSwPowerCap))
      << "a power cap is kept and recorded";
}

TEST(Measurer, AMachineThatOnlyThrottlesIsQuarantined) {
  FakeMachine machine;
  machine.events = [](double) { return kEventPowerBrake; };
  FakeBackend backend(machine);
  const auto outcomes = Measurer(backend).run(pair_group());
  ASSERT_TRUE(outcomes);
  EXPECT_EQ(outcomes->front().result.state, TrialState::kQuarantined);
  EXPECT_NE(outcomes->front().result.reason.find("power brake"), std::string::npos);
  EXPECT_FALSE(outcomes->front().result.timing);
}

TEST(Measurer, ScreeningDropsTheSlowAfterOneRound) {
  FakeMachine machine;
  machine.ns = fast_and_slow;
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  group.purpose = Screening{.drop_above = 1.15};
  group.stop = {.target = kAnyWidth, .min_s = 0.02, .max_s = 0.02, .min_blocks = 1};
  const auto outcomes = Measurer(backend).run(group);
  ASSERT_TRUE(outcomes);
  EXPECT_EQ((*outcomes)[1].blocks.size(), 1u);
  EXPECT_GT((*outcomes)[0].blocks.size(), 5u);
}

// If all candidates are alike, each block has another fastest one, and all of them can be behind it
// by more than the limit.
TEST(Measurer, TheFrontRunnerOfANoisyScreeningStays) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    FakeMachine machine;
    machine.noise = 0.03;
    machine.seed = seed;
    FakeBackend backend(machine);
    InterleavedGroup group = pair_group();
    group.candidates.assign(16, generated("alike"));
    group.purpose = Screening{.drop_above = 1.15};
    group.stop = {.target = kAnyWidth, .min_s = 0.2, .max_s = 0.2, .min_blocks = 1};
    group.warm_s = 0;
    group.seed = seed;
    const auto outcomes = Measurer(backend).run(group);
    ASSERT_TRUE(outcomes) << "seed " << seed << ": " << outcomes.error().message;
    size_t most_blocks = 0;
    for (const CandidateOutcome& outcome : *outcomes) {
      EXPECT_TRUE(outcome.result.is_timed());
      most_blocks = std::max(most_blocks, outcome.blocks.size());
    }
    EXPECT_GE(most_blocks, 30u) << "seed " << seed;
  }
}

TEST(Measurer, AThrottledScreeningQuarantinesTheDroppedToo) {
  FakeMachine machine;
  machine.ns = fast_and_slow;
  // The slow candidate has been dropped by then.
  machine.events = [](double now) { return now > 0.6 ? kEventPowerBrake : 0; };
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  group.purpose = Screening{.drop_above = 1.15};
  group.stop = {.target = kAnyWidth, .min_s = 9, .max_s = 9, .min_blocks = 1};
  const auto outcomes = Measurer(backend).run(group);
  ASSERT_TRUE(outcomes);
  for (const CandidateOutcome& outcome : *outcomes) {
    EXPECT_EQ(outcome.result.state, TrialState::kQuarantined);
    EXPECT_FALSE(outcome.result.timing);
  }
}

TEST(Measurer, WarmsUpOncePerThermalBlock) {
  FakeMachine machine;
  machine.ns = fast_and_slow;
  // The clock settles half a second after the first work.
  machine.sm_mhz = [](double now) { return now < 0.5 ? 1980 - 400 * now : 1700.0; };
  FakeBackend backend(machine);
  Measurer measurer(backend);
  InterleavedGroup group = pair_group();
  group.warm_s = 3;
  ASSERT_TRUE(measurer.run(group));
  const double first = backend.now_s();
  EXPECT_GT(first, 0.5);
  ASSERT_TRUE(measurer.run(group));
  const double second = backend.now_s() - first;
  EXPECT_LT(second, 0.3) << "warm already";
  backend.sleep_s(10);
  const double before = backend.now_s();
  ASSERT_TRUE(measurer.run(group));
  EXPECT_GT(backend.now_s() - before, second + 0.2) << "an idle device must be warmed again";
}

TEST(Measurer, BatchesAreAsLongAsAskedThoughSingleLaunchesAreSlow) {
  FakeMachine machine;
  machine.ns = [](const Problem&, const Candidate&, double) { return 2e3; };
  machine.estimate_factor = 4;
  FakeBackend backend(machine);
  InterleavedGroup group = pair_group();
  group.batch_us = 200;
  ASSERT_TRUE(Measurer(backend).run(group));
  EXPECT_NEAR(backend.launches(0), 100, 5);
}

TEST(Measurer, TheSameSeedMeasuresTheSame) {
  const auto run = [](uint64_t seed) {
    FakeMachine machine;
    machine.ns = fast_and_slow;
    FakeBackend backend(machine);
    InterleavedGroup group = pair_group();
    group.seed = seed;
    return Measurer(backend).run(group).value().front().result.timing->median_ns;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

}  // namespace
}  // namespace f8::tuner
