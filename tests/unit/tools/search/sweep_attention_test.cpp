// A sweep of attention on a fake machine: what it plans, keeps, resumes and leaves out.
#include "tests/unit/tools/backend/gpu_backend_fixture.hpp"
#include "tests/unit/tools/search/sweep_fixture.hpp"
#include "tools/tuner/search/sweep/measured.hpp"

namespace f8::tuner {
namespace {

class AttentionSweepTest : public SweepTest {
 protected:
  void SetUp() override {
    SweepTest::SetUp();
    request_.attention = AttentionRequest{
        .shapes = {{.tokens = 512, .heads_q = 4, .heads_kv = 2, .head_dim = 64},
                   {.tokens = 256, .heads_q = 4, .heads_kv = 2, .head_dim = 64, .causal = false}},
        .recipes = {kAttentionRecipes.begin(), kAttentionRecipes.end()},
        .accuracy_tokens = 24};
    machine_.ns = [](const Problem& p, const Candidate&, double) {
      return p.op == Op::kAttentionForward ? 100e3 : 250e3;
    };
  }
  std::vector<Problem> parts() { return problems_of(request_).value(); }
  TrialRow row(const Problem& part) {
    const auto all = rows(part);
    EXPECT_EQ(all.size(), 1U) << part.key();
    return all.at(0);
  }
};

TEST_F(AttentionSweepTest, PlansThePartsThatAreInFp8SmallOnesFirst) {
  std::vector<std::string> keys;
  for (const PlannedLinear& part : plan().linears) {
    keys.push_back(part.problem.key());
    EXPECT_FALSE(part.kernels.empty());
    EXPECT_GT(part.predicted_s, 0);
  }
  const std::vector<std::string> expected = {
      "attention_forward/fp8_forward/e4m3.e4m3.bf16/s256b1h4g2d64causal0",
      "attention_forward/fp8/e4m3.e4m3.bf16/s256b1h4g2d64causal0",
      "attention_backward/fp8/e4m3.e4m3.bf16/s256b1h4g2d64causal0",
      "attention_forward/fp8_forward/e4m3.e4m3.bf16/s512b1h4g2d64causal1",
      "attention_forward/fp8/e4m3.e4m3.bf16/s512b1h4g2d64causal1",
      "attention_backward/fp8/e4m3.e4m3.bf16/s512b1h4g2d64causal1"};
  EXPECT_EQ(keys, expected);
  EXPECT_EQ(plan().trials.size(), expected.size());
}

TEST_F(AttentionSweepTest, KeepsTimesAndAccuracyOfEachPart) {
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->end, SweepEnd::kDone);
  EXPECT_EQ(outcome->progress.done, 6);
  ASSERT_EQ(outcome->linears.size(), 6U);
  for (const Problem& part : parts()) {
    const TrialRow kept = row(part);
    const bool forward = part.op == Op::kAttentionForward;
    EXPECT_EQ(kept.candidate.impl, tuning_db::Impl::kFloat8);
    EXPECT_EQ(kept.fidelity, "final");
    ASSERT_EQ(kept.result.state, TrialState::kOk) << kept.result.reason;
    EXPECT_NEAR(kept.result.timing->median_ns, forward ? 100e3 : 250e3, 2e3);
    EXPECT_FALSE(kept.result.ratio) << "there is no bf16";
    ASSERT_EQ(kept.result.accuracy.size(), kAttentionData.size() * (forward ? 1 : 3));
    for (const tuning_db::Accuracy& a : kept.result.accuracy) {
      EXPECT_EQ(a.tensor == "O", forward);
      EXPECT_NEAR(a.sqnr_db, 40, 0.1) << "the fake results are 1 % too large";
    }
  }
}

TEST_F(AttentionSweepTest, ResumesWithWhatIsMissing) {
  int measured = 0;
  hooks_.interrupts = [&] { return measured >= 2 ? 1 : 0; };
  hooks_.finished = [&](const auto&, const auto&, const auto&) { ++measured; };
  const auto first = sweep_all();
  ASSERT_TRUE(first) << first.error().message;
  EXPECT_EQ(first->end, SweepEnd::kInterrupted);
  EXPECT_EQ(first->progress.done, 2);
  hooks_.interrupts = nullptr;
  Database db = open();
  const auto second = sweep(db, run_);
  ASSERT_TRUE(second) << second.error().message;
  EXPECT_EQ(second->end, SweepEnd::kDone);
  EXPECT_EQ(second->progress.done, 4);
  for (const Problem& part : parts()) EXPECT_EQ(row(part).result.state, TrialState::kOk);
}

TEST_F(AttentionSweepTest, LeavesOutWhatTheDatabaseHas) {
  ASSERT_TRUE(sweep_all());
  const Database db = open();
  const Database* const databases[] = {&db};
  SweepRequest more = request_;
  more.attention->shapes.push_back({.tokens = 1024, .heads_q = 4, .heads_kv = 2, .head_dim = 64});
  more.skipped = measured_linears(databases, more, h100(), toolchain()).value();
  EXPECT_EQ(more.skipped.size(), 6U);
  request_ = more;
  ASSERT_EQ(plan().linears.size(), 3U);
  EXPECT_EQ(attention_shape(plan().linears.front().problem).tokens, 1024);
  // Other data of the accuracy, or a hot cache, is another method.
  more.attention->accuracy_tokens = 48;
  EXPECT_TRUE(measured_linears(databases, more, h100(), toolchain()).value().empty());
  more = request_;
  more.options.conditions.l2 = L2State::kHot;
  EXPECT_TRUE(measured_linears(databases, more, h100(), toolchain()).value().empty());
}

TEST_F(AttentionSweepTest, APartThatCrashesCostsItAlone) {
  machine_.misbehaviour = [](const Problem& p, const Candidate&) {
    return p.op == Op::kAttentionBackward ? Misbehaviour::kAbort : Misbehaviour::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->end, SweepEnd::kDone);
  for (const Problem& part : parts()) {
    const TrialState state = row(part).result.state;
    if (part.op == Op::kAttentionForward) {
      EXPECT_EQ(state, TrialState::kOk);
    } else {
      EXPECT_TRUE(state == TrialState::kLaunchError || state == TrialState::kQuarantined)
          << to_string(state);
    }
  }
}

TEST_F(AttentionSweepTest, AnAccuracyThatFailsLeavesTheTime) {
  machine_.misbehaviour = [](const Problem& p, const Candidate&) {
    return p.op == Op::kAttention ? Misbehaviour::kSticky : Misbehaviour::kNone;
  };
  ASSERT_TRUE(sweep_all());
  const TrialRow kept = row(parts().front());
  EXPECT_EQ(kept.result.state, TrialState::kOk);
  EXPECT_TRUE(kept.result.accuracy.empty());
  EXPECT_NE(kept.result.reason.find("its accuracy is not known"), std::string::npos)
      << kept.result.reason;
}

TEST_F(AttentionSweepTest, WithoutTokensThereIsNoAccuracy) {
  request_.attention->accuracy_tokens = 0;
  ASSERT_TRUE(sweep_all());
  EXPECT_TRUE(row(parts().front()).result.accuracy.empty());
}

// The worker's device computes what it launches.
class EmulatedAttentionSweepTest : public AttentionSweepTest {
 protected:
  Spawn spawn() override {
    return spawn_that([](int in, int out) {
      static testing::FakeCuda cuda;
      static testing::FakeCublasLt library;
      testing::g_fakes = {};
      testing::g_cuda = &cuda;
      testing::g_library = &library;
      cuda.launches.reserve(1 << 16);
      static const runtime::Driver driver = testing::complete(cuda.table());
      runtime::set_driver_for_testing(&driver);
      return serve(
          []() -> Result<std::unique_ptr<Backend>> {
            return F8_TRY(GpuBackend::create(
                cuda.context(), {.max_sets = 2, .copy_bytes = 1 << 16, .cache_dir = {}}));
          },
          in, out);
    });
  }
};

TEST_F(EmulatedAttentionSweepTest, RowsAreThoseOfTheKernels) {
  request_.attention->shapes = {{.tokens = 40, .heads_q = 2, .head_dim = 64},
                                {.tokens = 24, .head_dim = 256, .causal = false}};
  request_.attention->accuracy_tokens = 130;
  request_.options.linear_min_ms = 1;
  request_.options.linear_max_ms = 2;
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  for (const Problem& part : parts()) {
    const tuning_db::TrialResult kept = row(part).result;
    ASSERT_TRUE(kept.is_timed()) << part.key() << ": " << kept.reason;
    EXPECT_GT(kept.sqnr_db.value_or(0), 18) << "it is checked before it is timed";
    EXPECT_EQ(kept.accuracy.size(), part.op == Op::kAttentionForward ? 4U : 12U);
    for (const tuning_db::Accuracy& a : kept.accuracy) {
      EXPECT_GT(a.sqnr_db, 12) << a.data << a.tensor << ": of few tokens";
      EXPECT_LT(a.sqnr_db, 50) << a.data << a.tensor;
    }
  }
}

}  // namespace
}  // namespace f8::tuner
