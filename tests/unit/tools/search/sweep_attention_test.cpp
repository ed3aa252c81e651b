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
    machine_.ns = [](const Problem& p, const Candidate& c, double) { return ns_of(p.op, c.impl); };
  }
  static double ns_of(Op op, Impl impl) {
    if (op == Op::kAttention) return impl == Impl::kBf16 ? 525e3 : 350e3;
    return op == Op::kAttentionForward ? 100e3 : 250e3;
  }
  std::vector<Problem> operations() { return problems_of(request_).value(); }
  TrialRow row(const Problem& operation, std::string_view impl = "float8") {
    const auto all = rows(operation, impl);
    EXPECT_EQ(all.size(), 1U) << operation.key();
    return all.at(0);
  }
};

TEST_F(AttentionSweepTest, PlansPartsAndBothTogetherSmallOnesFirst) {
  std::vector<std::string> keys;
  for (const PlannedLinear& operation : plan().linears) {
    keys.push_back(operation.problem.key());
    EXPECT_FALSE(operation.kernels.empty());
    EXPECT_GT(operation.predicted_s, 0);
  }
  std::vector<std::string> expected;
  for (const char* dims : {"s256b1h4g2d64causal0", "s512b1h4g2d64causal1"}) {
    for (const char* operation :
         {"attention_forward/fp8_forward", "attention/fp8_forward", "attention_forward/fp8",
          "attention_backward/fp8", "attention/fp8"}) {
      expected.push_back(f8::format("{}/e4m3.e4m3.bf16/{}", operation, dims));
    }
  }
  EXPECT_EQ(keys, expected);
  EXPECT_EQ(plan().trials.size(), expected.size() + 4) << "bf16 beside both together";
}

TEST_F(AttentionSweepTest, KeepsTimesAndAccuracyOfEachOperation) {
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->end, SweepEnd::kDone);
  EXPECT_EQ(outcome->progress.done, 14);
  EXPECT_NEAR(outcome->progress.best_speedup, 1.5, 0.02);
  ASSERT_EQ(outcome->linears.size(), 10U);
  for (const Problem& operation : operations()) {
    const TrialRow kept = row(operation);
    const bool forward = operation.op == Op::kAttentionForward;
    const bool both = operation.op == Op::kAttention;
    EXPECT_EQ(kept.fidelity, "final");
    ASSERT_EQ(kept.result.state, TrialState::kOk) << kept.result.reason;
    EXPECT_NEAR(kept.result.timing->median_ns, ns_of(operation.op, Impl::kFloat8), 5e3);
    ASSERT_EQ(kept.result.ratio.has_value(), both) << "the parts have no bf16";
    ASSERT_EQ(kept.result.accuracy.size(), kAttentionData.size() * (both ? 4 : forward ? 1 : 3));
    for (const tuning_db::Accuracy& a : kept.result.accuracy) {
      EXPECT_TRUE(both || (a.tensor == "O") == forward) << a.tensor;
      EXPECT_NEAR(a.sqnr_db, 40, 0.1) << "the fake results are 1 % too large";
    }
    if (!both) continue;
    const TrialRow bf16 = row(operation, "bf16");
    EXPECT_EQ(bf16.candidate.config, R"({"backend":"cudnn"})");
    EXPECT_NEAR(bf16.result.timing->median_ns, ns_of(operation.op, Impl::kBf16), 5e3);
    EXPECT_EQ(kept.result.ratio->pair_uuid, bf16.uuid);
    EXPECT_NEAR(kept.result.ratio->ratio, 1.5, 0.02);
    EXPECT_LT(kept.result.ratio->lo, kept.result.ratio->hi);
  }
}

// What a device without cuDNN refuses.
TEST_F(AttentionSweepTest, WithoutBf16ThePartsAreMeasuredAndTheRestSaysWhy) {
  machine_.misbehaviour = [](const Problem& p, const Candidate&) {
    return p.op == Op::kAttention ? Misbehaviour::kUnsupported : Misbehaviour::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->end, SweepEnd::kDone);
  EXPECT_EQ(outcome->progress.done, 14);
  for (const Problem& operation : operations()) {
    if (operation.op != Op::kAttention) {
      EXPECT_EQ(row(operation).result.state, TrialState::kOk);
      const size_t tensors = operation.op == Op::kAttentionForward ? 1 : 3;
      EXPECT_EQ(row(operation).result.accuracy.size(), kAttentionData.size() * tensors);
      continue;
    }
    for (const char* impl : {"float8", "bf16"}) {
      const tuning_db::TrialResult refused = row(operation, impl).result;
      EXPECT_EQ(refused.state, TrialState::kPruned);
      EXPECT_EQ(refused.reason, "not on this device");
      EXPECT_FALSE(refused.ratio);
    }
  }
  // Where there is bf16 later, it is measured then.
  const Database db = open();
  const Database* const databases[] = {&db};
  EXPECT_EQ(measured_linears(databases, request_, h100(), toolchain()).value().size(), 6U);
}

TEST_F(AttentionSweepTest, ResumesWithWhatIsMissing) {
  int measured = 0;
  hooks_.interrupts = [&] { return measured >= 2 ? 1 : 0; };
  hooks_.finished = [&](const auto&, const auto&, const auto&) { ++measured; };
  const auto first = sweep_all();
  ASSERT_TRUE(first) << first.error().message;
  EXPECT_EQ(first->end, SweepEnd::kInterrupted);
  EXPECT_EQ(first->progress.done, 3) << "a pair is measured together";
  hooks_.interrupts = nullptr;
  Database db = open();
  const auto second = sweep(db, run_);
  ASSERT_TRUE(second) << second.error().message;
  EXPECT_EQ(second->end, SweepEnd::kDone);
  EXPECT_EQ(second->progress.done, 11);
  for (const Problem& operation : operations()) {
    EXPECT_EQ(row(operation).result.state, TrialState::kOk);
  }
}

TEST_F(AttentionSweepTest, LeavesOutWhatTheDatabaseHas) {
  ASSERT_TRUE(sweep_all());
  const Database db = open();
  const Database* const databases[] = {&db};
  SweepRequest more = request_;
  more.attention->shapes.push_back({.tokens = 1024, .heads_q = 4, .heads_kv = 2, .head_dim = 64});
  more.skipped = measured_linears(databases, more, h100(), toolchain()).value();
  EXPECT_EQ(more.skipped.size(), 10U);
  request_ = more;
  ASSERT_EQ(plan().linears.size(), 5U);
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
  for (const Problem& operation : operations()) {
    const TrialState state = row(operation).result.state;
    if (operation.op != Op::kAttentionBackward) {
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
  const TrialRow kept = row(operations().front());
  EXPECT_EQ(kept.result.state, TrialState::kOk);
  EXPECT_TRUE(kept.result.accuracy.empty());
  EXPECT_NE(kept.result.reason.find("its accuracy is not known"), std::string::npos)
      << kept.result.reason;
}

TEST_F(AttentionSweepTest, WithoutTokensThereIsNoAccuracy) {
  request_.attention->accuracy_tokens = 0;
  ASSERT_TRUE(sweep_all());
  EXPECT_TRUE(row(operations().front()).result.accuracy.empty());
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
            const auto context = cuda.context();
            testing::give_cudnn(*context);
            return F8_TRY(GpuBackend::create(
                context, {.max_sets = 2, .copy_bytes = 1 << 16, .cache_dir = {}}));
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
  for (const Problem& operation : operations()) {
    const tuning_db::TrialResult kept = row(operation).result;
    ASSERT_TRUE(kept.is_timed()) << operation.key() << ": " << kept.reason;
    EXPECT_GT(kept.sqnr_db.value_or(0), 18) << "it is checked before it is timed";
    const bool both = operation.op == Op::kAttention;
    EXPECT_EQ(kept.accuracy.size(), both ? 16U : operation.op == Op::kAttentionForward ? 4U : 12U);
    for (const tuning_db::Accuracy& a : kept.accuracy) {
      EXPECT_GT(a.sqnr_db, 12) << a.data << a.tensor << ": of few tokens";
      const bool in_fp8 = a.tensor == "O" || operation.recipe == "fp8";
      EXPECT_LT(a.sqnr_db, in_fp8 ? 50 : 60) << a.data << a.tensor;
    }
    ASSERT_EQ(kept.ratio.has_value(), both);
    if (!both) continue;
    const tuning_db::TrialResult bf16 = row(operation, "bf16").result;
    EXPECT_GT(bf16.sqnr_db.value_or(0), 40) << "it is in bf16";
    EXPECT_NEAR(kept.ratio->ratio, bf16.timing->median_ns / kept.timing->median_ns, 1e-6);
  }
}

}  // namespace
}  // namespace f8::tuner
