// Groups of linears of one x: the bits of the linears one by one with a shared x_tensor and
// accumulate_dx, in fewer launches.
#include "tests/unit/runtime/lists/linear_group_fixture.hpp"

namespace f8::runtime {
namespace {

using namespace testing;  // NOLINT: the fixture's names

INSTANTIATE_TEST_SUITE_P(Recipes, LinearGroupTest,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise", "bf16"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearGroupTest, TheSameAsOneByOneAtAnyM) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  for (const int64_t m : {int64_t{0}, int64_t{1}, int64_t{77}, kM}) {
    SCOPED_TRACE(m);
    Tensors together(trio, 1), alone(trio, 1);
    expect_the_same(trio, together, alone, {.m = m});
  }
}

TEST_P(LinearGroupTest, TheSameWithWeightsInFp8) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  for (const Weights weights : {Weights::kGiven, Weights::kMixed}) {
    SCOPED_TRACE(static_cast<int>(weights));
    Tensors together(trio, 2), alone(trio, 2);
    expect_the_same(trio, together, alone, {.m = 131, .weights = weights});
  }
}

TEST_P(LinearGroupTest, TheSameWithoutABackwardOrAGradient) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  for (const Weights weights : {Weights::kCast, Weights::kGiven}) {
    Tensors together(trio, 3), alone(trio, 3);
    expect_the_same(trio, together, alone, {.m = 50, .weights = weights, .saved = false});
  }
  for (const GroupStep& step : {GroupStep{.m = 50, .dx = false}, GroupStep{.m = 50, .dw = false},
                                GroupStep{.m = 50, .accumulate = true}}) {
    Tensors together(trio, 4), alone(trio, 4);
    for (Tensors* to : {&together, &alone}) {
      zero(to->dx);
      for (auto* of : {&to->dw, &to->db}) std::ranges::for_each(*of, zero);
    }
    expect_the_same(trio, together, alone, step);
  }
}

TEST_P(LinearGroupTest, TheSameWithBiasGradients) {
  const Trio trio(cuda_, GetParam(), true, NonFinite::kPropagate);
  for (const int64_t m : {0, 129}) {
    SCOPED_TRACE(m);
    Tensors together(trio, 5), alone(trio, 5);
    expect_the_same(trio, together, alone, {.m = m});
  }
}

TEST_P(LinearGroupTest, TheSameForWhatIsNotFinite) {
  for (const NonFinite non_finite : {NonFinite::kPropagate, NonFinite::kSaturate}) {
    const Trio trio(cuda_, GetParam(), false, non_finite);
    Tensors together(trio, 6), alone(trio, 6);
    for (Tensors* to : {&together, &alone}) {
      reinterpret_cast<uint16_t*>(to->x.data())[300] = 0x7f80;
      reinterpret_cast<uint16_t*>(to->dy.data())[20] = 0x7fc1;
    }
    expect_the_same(trio, together, alone, {.m = 77});
  }
}

// With delayed scaling, x is cast with the scale of the first linear's slots.
TEST_P(LinearGroupTest, TheSameOverSteps) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  Tensors together(trio, 7), alone(trio, 7);
  for (const GroupStep& step :
       {GroupStep{.m = 77}, GroupStep{.m = kM, .first_step = false},
        GroupStep{.m = 12, .weights = Weights::kGiven, .first_step = false},
        GroupStep{.m = 40, .saved = false, .first_step = false, .evaluate = true}}) {
    SCOPED_TRACE(step.m);
    expect_the_same(trio, together, alone, step);
    if (trio.delayed->bytes() == 0) continue;
    for (Tensors* to : {&together, &alone}) {
      ASSERT_TRUE(trio.delayed->update(to->state.data(), nullptr));
    }
    EXPECT_EQ(bytes(together.state), bytes(alone.state));
  }
}

// The first scales come from all ranks' maxima, in one reduction for x and the weights and one for
// all dy.
TEST_P(LinearGroupTest, TheSameInAFirstStepOverRanks) {
  if (GetParam() != std::string_view("delayed")) GTEST_SKIP() << "no scale is kept";
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  int any = 0;
  for (const Weights weights : {Weights::kCast, Weights::kGiven}) {
    Tensors together(trio, 11), alone(trio, 11);
    GroupStep step{.m = 77, .weights = weights};
    step.ranks = reinterpret_cast<float8_nccl_comm>(&any);
    reductions = 0;
    run_group(trio, together, step);
    EXPECT_EQ(reductions, weights == Weights::kCast ? 2 : 2 + 3);
    run_alone(trio, alone, step);
    for (Tensors* to : {&together, &alone}) {
      ASSERT_TRUE(trio.delayed->update(to->state.data(), nullptr));
    }
    expect_equal(together, alone);
    ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }
}

TEST_P(LinearGroupTest, ItsLaunchesAreFewer) {
  const Trio trio(cuda_, GetParam(), false, NonFinite::kPropagate);
  Tensors to(trio, 8);
  const auto launches = [&](const GroupStep& step) {
    cuda_.launches.clear();
    run_group(trio, to, step);
    return cuda_.launches.size();
  };
  // GEMMs in high precision are cuBLASLt's, which the driver does not see.
  const LinearGroup::Launches planned = trio.group->launches(kM);
  const LinearGroup::Launches alone = trio.group->launches_one_by_one(kM);
  EXPECT_LE(planned.forward, alone.forward);
  EXPECT_LE(planned.forward_with_weights, alone.forward_with_weights);
  EXPECT_LE(planned.backward, alone.backward);
  const std::string_view recipe = GetParam();
  if (recipe == "bf16" || recipe == "rowwise_with_gw_hp") return;
  const GroupStep step{.first_step = false};
  EXPECT_EQ(launches({.saved = false, .first_step = false}), planned.forward);
  EXPECT_EQ(launches(step), planned.forward + planned.backward);
  if (recipe == "tensorwise") {
    // One launch casts x and the weights, or all dy; then a GEMM for each result.
    EXPECT_EQ(planned.forward, 4U);
    EXPECT_EQ(planned.forward_with_weights, 4U);
    EXPECT_EQ(alone.forward, 6U);
    EXPECT_EQ(alone.forward_with_weights, 6U);
  }
}

}  // namespace
}  // namespace f8::runtime
