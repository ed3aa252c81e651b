#include "tools/tuner/worker/worker.hpp"

#include <gtest/gtest.h>

#include "tests/unit/tools/fake_backend.hpp"
#include "tools/tuner/measure/measurer.hpp"
#include "tools/tuner/worker/protocol.hpp"

namespace f8::tuner {
namespace {

using tuning_db::TrialState;

InterleavedGroup group_of(std::vector<std::string> configs) {
  InterleavedGroup group;
  group.problem = test_problem();
  for (std::string& config : configs) {
    group.candidates.push_back({.impl = Impl::kGenerated, .config = std::move(config)});
  }
  group.stop = {.target = 0.01, .min_s = 0, .max_s = 0.1, .min_blocks = 4};
  group.warm_s = 0.1;
  group.seed = 5;
  return group;
}

FakeMachine with_misbehaviour(const std::string& config, Misbehaviour misbehaviour) {
  FakeMachine machine;
  machine.misbehaviour = [=](const Problem&, const Candidate& s) {
    return s.config == config ? misbehaviour : Misbehaviour::kNone;
  };
  return machine;
}

TEST(Worker, SendsWhatTheMeasurerMeasures) {
  Worker worker(spawn_fake({}), {});
  const InterleavedGroup group = group_of({"a", "b"});
  const auto reply = worker.measure(group);
  ASSERT_TRUE(reply) << reply.error().message;
  ASSERT_FALSE(reply->failure);
  FakeBackend local{FakeMachine{}};
  const auto expected = Measurer(local).run(group);
  ASSERT_TRUE(expected);
  ASSERT_EQ(reply->results.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(reply->results[i].timing->median_ns, (*expected)[i].result.timing->median_ns);
    EXPECT_EQ(reply->results[i].state, (*expected)[i].result.state);
  }
  EXPECT_EQ(worker.device().name, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(worker.suggestions(test_problem(), true).value().count, 2);
  EXPECT_EQ(worker.starts(), 1);
}

TEST(Worker, MeasuresUnderTheConditionsOfTheGroup) {
  FakeMachine machine;
  machine.hot_factor = 0.5;
  machine.samples = 0;
  Worker worker(spawn_fake(machine), {});
  InterleavedGroup group = group_of({"a", "b"});
  const auto cold = worker.measure(group);
  group.conditions = {.l2 = L2State::kHot, .clock = ClockPolicy::kLocked};
  const auto hot = worker.measure(group);
  ASSERT_TRUE(cold && hot);
  EXPECT_NEAR(hot->results[0].timing->median_ns / cold->results[0].timing->median_ns, 0.5, 0.01);
  EXPECT_NE(hot->results[0].reason.find("no SM clock"), std::string::npos)
      << hot->results[0].reason;
}

TEST(Worker, ACrashNamesTheCandidateThatWasRunning) {
  Worker worker(spawn_fake(with_misbehaviour("b", Misbehaviour::kAbort)), {});
  const auto reply = worker.measure(group_of({"a", "b", "c"}));
  ASSERT_TRUE(reply);
  ASSERT_TRUE(reply->failure);
  EXPECT_EQ(reply->failure->kind, WorkerFailure::Kind::kCrash);
  EXPECT_EQ(reply->failure->candidate, 1);
  EXPECT_NE(reply->failure->reason.find("signal 6"), std::string::npos) << reply->failure->reason;
  // Another worker takes its place.
  const auto again = worker.measure(group_of({"a", "c"}));
  ASSERT_TRUE(again);
  EXPECT_FALSE(again->failure);
  EXPECT_EQ(worker.starts(), 2);
}

TEST(Worker, ABrokenDeviceIsAFailureWithItsMessage) {
  Worker worker(spawn_fake(with_misbehaviour("a", Misbehaviour::kSticky)), {});
  const auto reply = worker.measure(group_of({"a"}));
  ASSERT_TRUE(reply);
  ASSERT_TRUE(reply->failure);
  EXPECT_EQ(reply->failure->candidate, 0);
  EXPECT_EQ(reply->failure->reason, "CUDA_ERROR_ILLEGAL_ADDRESS");
}

TEST(Worker, AHangIsEndedAfterItsTime) {
  Worker worker(spawn_fake(with_misbehaviour("b", Misbehaviour::kHang)),
                {.start_timeout_s = 100, .trial_timeout_s = 1, .tick = nullptr});
  const auto reply = worker.measure(group_of({"a", "b"}));
  ASSERT_TRUE(reply);
  ASSERT_TRUE(reply->failure);
  EXPECT_EQ(reply->failure->kind, WorkerFailure::Kind::kTimeout);
  EXPECT_EQ(reply->failure->candidate, 1);
}

TEST(Worker, AFailureWhileAllAreTimedBlamesNobody) {
  Worker worker(spawn_fake(with_misbehaviour("b", Misbehaviour::kAbortInTiming)), {});
  const auto reply = worker.measure(group_of({"a", "b"}));
  ASSERT_TRUE(reply);
  ASSERT_TRUE(reply->failure);
  EXPECT_EQ(reply->failure->candidate, -1);
  const auto alone = worker.measure(group_of({"b"}));
  ASSERT_TRUE(alone);
  ASSERT_TRUE(alone->failure);
  EXPECT_EQ(alone->failure->candidate, 0);
}

TEST(Worker, TickInterruptsAWait) {
  bool stop = false;
  Worker worker(spawn_fake(with_misbehaviour("a", Misbehaviour::kHang)),
                {.start_timeout_s = 100, .trial_timeout_s = 60, .tick = [&] { return stop; }});
  ASSERT_TRUE(worker.start());
  stop = true;
  const auto reply = worker.measure(group_of({"a"}));
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code, ErrorCode::kInterrupted);
}

TEST(Worker, AMachineWithoutAGpuSaysSo) {
  Worker worker(spawn_that([](int in, int out) {
                  return serve(
                      []() -> Result<std::unique_ptr<Backend>> {
                        return fail(ErrorCode::kEnvironment, "there is no NVIDIA driver here");
                      },
                      in, out);
                }),
                {});
  const Status started = worker.start();
  ASSERT_FALSE(started);
  EXPECT_EQ(started.error().code, ErrorCode::kEnvironment);
  EXPECT_EQ(started.error().message, "there is no NVIDIA driver here");
}

TEST(Worker, OneThatDiesOrBabblesAtTheStartIsAnError) {
  Worker dies(spawn_that([](int, int) { return 3; }), {});
  const Status started = dies.start();
  ASSERT_FALSE(started);
  EXPECT_NE(started.error().message.find("status 3"), std::string::npos) << started.error().message;
  Worker babbles(
      spawn_that([](int, int out) { return ::write(out, "Hello, world\n", 13) == 13 ? 0 : 1; }),
      {});
  EXPECT_FALSE(babbles.start());
  Worker silent(spawn_that([](int in, int) {
                  char byte = 0;
                  return static_cast<int>(::read(in, &byte, 1));
                }),
                {.start_timeout_s = 0.2, .trial_timeout_s = 1, .tick = nullptr});
  EXPECT_FALSE(silent.start());
}

TEST(Protocol, AResultSurvivesTheWay) {
  tuning_db::TrialResult result;
  result.state = TrialState::kNoisy;
  result.reason = "half-width 1 % > 0.5 %, \"quoted\"\nand two lines";
  result.predicted_ns = 1.25;
  result.rel_err = 0.002;
  result.sqnr_db = 31.5;
  result.compile_ms = 410;
  result.registers = 168;
  result.smem_bytes = 200000;
  result.spill_bytes = 0;
  result.sm_mhz_mean = 1600.5;
  result.sm_mhz_min = 1500;
  result.power_w = 690.25;
  result.temp_c = 61;
  result.clock_event_mask = 4;
  result.timing = tuning_db::Timing{.n = 10,
                                    .n_dropped = 2,
                                    .median_ns = 100.125,
                                    .mad_ns = 1,
                                    .p05_ns = 99,
                                    .p95_ns = 102,
                                    .ci_lo_ns = 99.5,
                                    .ci_hi_ns = 100.5};
  result.ratio = tuning_db::Ratio{.pair_uuid = "", .ratio = 1.4, .lo = 1.39, .hi = 1.41};
  const auto back = parse_result(parse_message(to_json(result).dump(), "test").value());
  ASSERT_TRUE(back) << back.error().message;
  EXPECT_EQ(to_json(*back), to_json(result));
  EXPECT_EQ(back->timing->ci_hi_ns, 100.5);
  EXPECT_EQ(back->state, TrialState::kNoisy);
}

TEST(Protocol, AGroupSurvivesTheWay) {
  InterleavedGroup group = group_of({"a", "b"});
  group.seed = 0xffffffffffffffffULL;
  for (const Purpose& purpose : {Purpose(Times{}), Purpose(Ratios{.reference = 1}),
                                 Purpose(Screening{.drop_above = 1.25})}) {
    group.purpose = purpose;
    const auto back = parse_group(to_json(group));
    ASSERT_TRUE(back);
    EXPECT_EQ(to_json(*back), to_json(group));
    EXPECT_EQ(back->problem, group.problem);
    EXPECT_EQ(back->seed, group.seed);
    EXPECT_EQ(back->purpose.index(), purpose.index());
  }
}

// A screening drops candidates, and a ratio to a reference needs all blocks of both.
TEST(Protocol, AScreeningHasNoReference) {
  InterleavedGroup group = group_of({"a", "b"});
  group.purpose = Ratios{.reference = 1};
  Json json = to_json(group);
  json["drop_above"] = 1.15;
  EXPECT_FALSE(parse_group(json));
  json.erase("drop_above");
  EXPECT_TRUE(parse_group(json));
  json["reference"] = 2;
  EXPECT_FALSE(parse_group(json)) << "there are two candidates";
}

TEST(Protocol, MalformedAnswersAreErrors) {
  EXPECT_FALSE(parse_message("{", "test"));
  EXPECT_FALSE(parse_message("[1]", "test"));
  EXPECT_FALSE(parse_result(Json{{"state", "splendid"}, {"reason", ""}}));
  EXPECT_FALSE(parse_result(Json{{"reason", ""}}));
  EXPECT_FALSE(parse_group(Json{{"problem", "output/none"}}));
  EXPECT_FALSE(parse_device(Json{{"name", 3}}));
}

}  // namespace
}  // namespace f8::tuner
