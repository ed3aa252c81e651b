// Every built-in recipe and mixes of settings that no built-in has: what forward and backward hand
// to the kernels, against the CPU reference.
#include <cmath>
#include <cstring>

#include "runtime/linear/plan/kernels.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::describe;
using testing::FakeCublasLt;
using testing::FakeCuda;
using testing::Fixture;
using testing::Fp8Weight;
using testing::says;

constexpr double kRounding = 2.5e-3;  // of bf16 results

constexpr CastSetting cast(Granularity granularity, Dtype dtype = Dtype::kE4m3, bool pow2 = false,
                           Scaling scaling = Scaling::kDynamic) {
  return {scaling, granularity, dtype, pow2};
}
constexpr CastSetting kTensor = cast(Granularity::kTensor);
constexpr CastSetting kTensorE5m2 = cast(Granularity::kTensor, Dtype::kE5m2);
constexpr CastSetting kAxis = cast(Granularity::kAxis);
constexpr CastSetting kAxisPow2 = cast(Granularity::kAxis, Dtype::kE4m3, true);
constexpr CastSetting kLine = cast(Granularity::kBlock1x128);
constexpr CastSetting kLineE5m2 = cast(Granularity::kBlock1x128, Dtype::kE5m2);
constexpr CastSetting kSquare = cast(Granularity::kBlock128x128);
constexpr CastSetting kDelayed = cast(Granularity::kTensor, Dtype::kE4m3, false, Scaling::kDelayed);
constexpr CastSetting kDelayedPow2 =
    cast(Granularity::kTensor, Dtype::kE4m3, true, Scaling::kDelayed);
constexpr CastSetting kNone = cast(Granularity::kTensor, Dtype::kBf16, false, Scaling::kDisabled);

std::vector<Recipe> recipes() {
  std::vector<Recipe> all(builtin_recipes().begin(), builtin_recipes().end());
  const auto add = [&](const char* name, GemmSetting output, GemmSetting grad_input,
                       GemmSetting grad_weight) {
    all.push_back({name, {output, grad_input, grad_weight}});
  };
  add("bf16", {kNone, kNone}, {kNone, kNone}, {kNone, kNone});
  add("tensor_and_axis", {kAxis, kTensor}, {kTensorE5m2, kAxis}, {kAxis, kTensor});
  add("two_formats", {kTensor, kAxisPow2}, {kAxis, kTensorE5m2}, {kTensor, kTensorE5m2});
  add("delayed_and_dynamic", {kDelayed, kTensor}, {kDelayed, kAxis}, {kTensor, kTensor});
  add("delayed_and_axis", {kDelayed, kDelayed}, {kDelayed, kDelayed}, {kAxis, kAxis});
  add("two_slots", {kDelayed, kDelayed}, {kDelayed, kDelayedPow2}, {kDelayed, kDelayedPow2});
  add("other_blocks", {kLine, kLine}, {kNone, kNone}, {kLineE5m2, kSquare});
  add("block_and_axis", {kAxis, kAxis}, {kLine, kSquare}, {kTensor, kTensor});
  add("gradients_alone", {kNone, kNone}, {kAxis, kAxis}, {kLine, kLine});
  return all;
}

LinearDesc describe(const Recipe& recipe, Shape shape) {
  LinearDesc desc;
  desc.shape = shape;
  desc.recipe = recipe;
  return desc;
}

class AnyRecipe : public ::testing::TestWithParam<Recipe> {
 protected:
  void expect_no_faults() { EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front(); }
  FakeCuda cuda_;
  FakeCublasLt library_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, AnyRecipe, ::testing::ValuesIn(recipes()),
                         [](const auto& suite) { return suite.param.name; });

// For the planned m and smaller ones, none a multiple of anything, over block borders.
TEST_P(AnyRecipe, GivesTheReferencesResults) {
  for (const int64_t m : {150, 129, 5}) {
    Fixture s(cuda_, describe(GetParam(), {150, 144, 272}), m);
    run_step(s);
    expect_no_faults();
    const auto expected = s.expected();
    EXPECT_LT(reference::relative_error(expected.y, s.y.bf16()), kRounding) << "m=" << m;
    EXPECT_LT(reference::relative_error(expected.dx, s.dx.bf16()), kRounding) << "m=" << m;
    EXPECT_LT(reference::relative_error(expected.dw, s.dw.bf16()), kRounding) << "m=" << m;
    EXPECT_TRUE(s.guards_are_whole()) << "m=" << m;
  }
}

TEST_P(AnyRecipe, OneGradientAloneGivesTheSame) {
  const LinearDesc desc = describe(GetParam(), {70, 48, 144});
  Fixture both(cuda_, desc, 70);
  run_step(both);
  Fixture apart(cuda_, desc, 70);
  ASSERT_TRUE(apart.linear->forward(apart.forward(), nullptr));
  BackwardCall call = apart.backward();
  call.dw.data = nullptr;
  ASSERT_TRUE(apart.linear->backward(with_workspace(call, apart.workspace.data()), nullptr));
  EXPECT_TRUE(apart.dw.untouched());
  call = apart.backward();
  call.dx.data = nullptr;
  ASSERT_TRUE(apart.linear->backward(with_workspace(call, apart.workspace.data()), nullptr));
  EXPECT_EQ(apart.dx.bf16(), both.dx.bf16());
  EXPECT_EQ(apart.dw.bf16(), both.dw.bf16());
  expect_no_faults();
}

TEST_P(AnyRecipe, AForwardWithoutBackwardGivesTheSame) {
  const LinearDesc desc = describe(GetParam(), {70, 48, 144});
  Fixture whole(cuda_, desc, 50);
  run_step(whole);
  Fixture bare(cuda_, desc, 50);
  ForwardCall call = bare.forward();
  call.saved.data = nullptr;
  ASSERT_TRUE(bare.linear->forward(with_workspace(call, bare.workspace.data()), nullptr));
  EXPECT_EQ(bare.y.bf16(), whole.y.bf16());
  EXPECT_TRUE(bare.saved.untouched());
  expect_no_faults();
}

// Nothing is kept in fp8 between forward and backward but the scales of whole tensors, and the bits
// are the same: both gradients, each alone, with the weight in fp8 and without.
TEST_P(AnyRecipe, RecomputingGivesTheSame) {
  LinearDesc desc = describe(GetParam(), {150, 144, 272});
  for (const int64_t m : {150, 33}) {
    Fixture kept(cuda_, desc, m);
    run_step(kept);
    desc.recompute = true;
    Fixture again(cuda_, desc, m);
    desc.recompute = false;
    EXPECT_LT(again.linear->saved_bytes(), 1024U);
    const bool keeps_scales = again.linear->saved_bytes() > 0;
    run_step(again);
    EXPECT_EQ(again.y.bf16(), kept.y.bf16());
    EXPECT_EQ(again.dx.bf16(), kept.dx.bf16());
    EXPECT_EQ(again.dw.bf16(), kept.dw.bf16());

    std::optional<Fp8Weight> weight;
    if (casts_weight(desc)) {
      ASSERT_TRUE(weight.emplace(again).run());
    }
    for (const bool given : {false, true}) {
      if (given && !weight) continue;
      for (const bool input : {false, true}) {
        std::memset(again.workspace.data(), testing::kPoison, again.linear->workspace_bytes());
        std::memset(again.dx.data(), testing::kPoison, again.dx.bytes());
        std::memset(again.dw.data(), testing::kPoison, again.dw.bytes());
        BackwardCall call = again.backward();
        if (!keeps_scales || (input && given)) call.saved.data = nullptr;
        call.w.fp8 = given ? &weight->view : nullptr;
        (input ? call.dw : call.dx) = {};
        const bool reads_w = input && !(given && GetParam().at(Gemm::kGradInput).is_fp8());
        if (!reads_w) call.w.data = nullptr;
        if (input) call.x.data = nullptr;
        const auto status = again.linear->backward(call, nullptr);
        ASSERT_TRUE(status) << status.error().message;
        testing::Buffer& wanted = input ? again.dx : again.dw;
        EXPECT_EQ(wanted.bf16(), (input ? kept.dx : kept.dw).bf16());
        EXPECT_TRUE((input ? again.dw : again.dx).untouched());
      }
    }
    expect_no_faults();
    EXPECT_TRUE(again.guards_are_whole());
  }
}

// fp8 as the weight's only storage: cast from fp32 masters, after which nobody has w.
TEST_P(AnyRecipe, MasterWeightsAreCastAtOnce) {
  const LinearDesc desc = describe(GetParam(), {70, 144, 272});
  if (!casts_weight(desc)) GTEST_SKIP() << "the weight is never cast";
  Fixture s(cuda_, desc, 70);
  QuantizerDesc of_master = weight_of(desc);
  of_master.dtype = Dtype::kF32;
  Fp8Weight weight(s, of_master);
  const bool needs_w = !GetParam().at(Gemm::kOutput).is_fp8();
  for (const bool rounded : {true, false}) {
    if (!rounded) {
      for (float& value : s.wm.values) value *= 1.00390625F;  // no bf16
    }
    testing::Buffer master(s.wm, Dtype::kF32);
    QuantizeCall cast = weight.call();
    cast.x.data = master.data();
    ASSERT_TRUE(weight.run(cast));
    std::memset(s.workspace.data(), testing::kPoison, s.linear->workspace_bytes());
    ForwardCall forward = s.forward();
    forward.w.fp8 = &weight.view;
    if (!needs_w) forward.w.data = nullptr;
    ASSERT_TRUE(s.linear->forward(forward, nullptr));
    BackwardCall backward = s.backward();
    backward.w.fp8 = &weight.view;
    if (GetParam().at(Gemm::kGradInput).is_fp8()) backward.w.data = nullptr;
    ASSERT_TRUE(s.linear->backward(backward, nullptr));
    expect_no_faults();
    const auto expected = s.expected();
    if (!needs_w) {
      EXPECT_LT(reference::relative_error(expected.y, s.y.bf16()), kRounding);
    }
    if (backward.w.data == nullptr) {
      EXPECT_LT(reference::relative_error(expected.dx, s.dx.bf16()), kRounding);
    }
    if (!rounded) continue;
    // Masters that are bf16 give the bits that the bf16 weight gives.
    Fp8Weight plain(s);
    for (Fp8Weight* of : {&weight, &plain}) std::memset(of->tensor.data(), 0, of->tensor.bytes());
    ASSERT_TRUE(weight.run(cast));
    ASSERT_TRUE(plain.run());
    EXPECT_EQ(bytes(weight.tensor), bytes(plain.tensor));
  }
}

// Two micro-batches with one cast of the weight, and a saved buffer without its part.
TEST_P(AnyRecipe, AWeightInFp8GivesTheSame) {
  const LinearDesc desc = describe(GetParam(), {70, 48, 144});
  if (!casts_weight(desc)) GTEST_SKIP() << "the weight is never cast";
  Fixture cached(cuda_, desc, 70);
  Fp8Weight weight(cached);
  EXPECT_LE(cached.linear->saved_bytes(true), cached.linear->saved_bytes());
  ASSERT_TRUE(weight.run());
  for (const int64_t m : {70, 33}) {
    std::memset(cached.workspace.data(), testing::kPoison, cached.linear->workspace_bytes());
    Fixture plain(cuda_, desc, m);
    run_step(plain);
    testing::Buffer saved(cached.linear->saved_bytes(true));
    ForwardCall forward = cached.forward();
    forward.m = m;
    forward.x.data = plain.x.data();
    forward.saved.data = saved.data();
    forward.w.fp8 = &weight.view;
    if (GetParam().at(Gemm::kOutput).is_fp8()) forward.w.data = nullptr;
    for (const Step& step :
         cached.linear->forward_steps(with_workspace(forward, cached.workspace.data()))) {
      EXPECT_EQ(step.name.find('w'), std::string::npos) << step.name;
    }
    ASSERT_TRUE(cached.linear->forward(with_workspace(forward, cached.workspace.data()), nullptr));
    BackwardCall backward = cached.backward();
    backward.m = m;
    backward.dy.data = plain.dy.data();
    backward.x.data = plain.x.data();
    backward.saved.data = saved.data();
    backward.w.fp8 = &weight.view;
    ASSERT_TRUE(
        cached.linear->backward(with_workspace(backward, cached.workspace.data()), nullptr));
    const auto front = [](std::vector<double> values, size_t count) {
      values.resize(count);
      return values;
    };
    EXPECT_EQ(front(cached.y.bf16(), plain.y.bf16().size()), plain.y.bf16());
    EXPECT_EQ(front(cached.dx.bf16(), plain.dx.bf16().size()), plain.dx.bf16());
    EXPECT_EQ(cached.dw.bf16(), plain.dw.bf16());
    EXPECT_TRUE(saved.guard_is_whole());
  }
  EXPECT_TRUE(cached.guards_are_whole());
  EXPECT_TRUE(weight.tensor.guard_is_whole());
  expect_no_faults();
}

TEST_P(AnyRecipe, BiasAndAccumulation) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF32}) {
    LinearDesc desc = describe(GetParam(), {70, 48, 144});
    desc.grad_weight_dtype = type;
    desc.bias = true;
    desc.accumulate_grad_weight = true;
    Fixture s(cuda_, desc, 70);
    run_step(s);
    auto expected = s.expected();
    for (size_t i = 0; i < expected.y.size(); ++i) {
      expected.y[i] += static_cast<double>(s.biasm.values[i % 48]);
    }
    EXPECT_LT(reference::relative_error(expected.y, s.y.bf16()), kRounding);
    const double bound = type == Dtype::kF32 ? 1e-6 : kRounding;
    EXPECT_LT(reference::relative_error(expected.dw, s.result_dw()), bound);
    BackwardCall again = s.backward();
    again.dw.accumulate = true;
    ASSERT_TRUE(s.linear->backward(again, nullptr));
    for (double& v : expected.dw) v *= 2;
    EXPECT_LT(reference::relative_error(expected.dw, s.result_dw()), 2 * bound);
    // An empty micro-batch adds nothing.
    const auto before = s.result_dw();
    again.m = 0;
    ASSERT_TRUE(s.linear->backward(with_workspace(again, nullptr), nullptr));
    EXPECT_EQ(s.result_dw(), before);
  }
  expect_no_faults();
}

TEST_P(AnyRecipe, AnEmptyBatchLaunchesNothing) {
  Fixture s(cuda_, describe(GetParam(), {64, 32, 48}), 64);
  const size_t before = cuda_.launches.size();
  ASSERT_TRUE(s.linear->forward({.m = 0}, nullptr));
  ASSERT_TRUE(s.linear->backward({.m = 0, .dw = {s.dw.data()}}, nullptr));
  EXPECT_EQ(cuda_.launches.size(), before);
  for (const double v : s.dw.bf16()) ASSERT_EQ(v, 0);
}

TEST_P(AnyRecipe, AFirstLayerNeedsNoGradientOfItsInput) {
  LinearDesc desc = describe(GetParam(), {70, 48, 144});
  Fixture whole(cuda_, desc, 70);
  run_step(whole);
  desc.needs_grad_input = false;
  Fixture s(cuda_, desc, 70);
  EXPECT_LE(s.linear->saved_bytes(), whole.linear->saved_bytes());
  run_step(s);
  EXPECT_EQ(s.y.bf16(), whole.y.bf16());
  EXPECT_EQ(s.dw.bf16(), whole.dw.bf16());
  BackwardCall call = s.backward();
  call.dx.data = s.dx.data();
  const Status refused = s.linear->backward(call, nullptr);
  ASSERT_FALSE(refused);
  EXPECT_TRUE(says(refused.error(), "no_grad_input")) << refused.error().message;
  expect_no_faults();
}

TEST_P(AnyRecipe, AFrozenWeightHasNoGradient) {
  LinearDesc desc = describe(GetParam(), {70, 48, 144});
  desc.bias_grad = true;
  Fixture whole(cuda_, desc, 70);
  run_step(whole);
  desc.needs_grad_weight = false;
  Fixture s(cuda_, desc, 70);
  // What forward keeps of x is for the weight's gradient.
  EXPECT_EQ(s.linear->saved_bytes(), s.linear->saved_bytes(false, true));
  EXPECT_EQ(s.linear->saved_bytes(), whole.linear->saved_bytes(false, true));
  EXPECT_LE(s.linear->scale_slots().size(), whole.linear->scale_slots().size());
  run_step(s);
  EXPECT_EQ(s.y.bf16(), whole.y.bf16());
  EXPECT_EQ(s.dx.bf16(), whole.dx.bf16());
  BackwardCall call = s.backward();
  call.dw.data = s.dw.data();
  const Status refused = s.linear->backward(call, nullptr);
  ASSERT_FALSE(refused);
  EXPECT_TRUE(says(refused.error(), "no_grad_weight")) << refused.error().message;
  expect_no_faults();
}

TEST_P(AnyRecipe, RunDoesNotCompileOrLoad) {
  const LinearDesc desc = describe(GetParam(), {70, 48, 144});
  const int before = cuda_.modules_loaded;
  Fixture s(cuda_, desc, 70);
  const auto specs = choose_kernels(desc, nullptr, cuda_.sm_count)->specs();
  EXPECT_EQ(static_cast<size_t>(cuda_.modules_loaded - before), specs.size());
  const int planned = cuda_.modules_loaded;
  run_step(s);
  EXPECT_EQ(cuda_.modules_loaded, planned);
}

// The bytes of a step are what its tensors make necessary.
TEST(LinearSteps, SayWhatTheyDoAndMove) {
  FakeCuda cuda;
  FakeCublasLt library;
  constexpr double kX = 70 * 144;
  constexpr double kW = 48 * 144;
  constexpr double kDy = 70 * 48;
  struct Expected {
    std::string name;
    double bytes;
  };
  const std::pair<const char*, std::vector<Expected>> cases[] = {
      {"delayed",
       {{"cast x,w", 4 * (kX + kW)},
        {"gemm output", 0},
        {"cast dy", 4 * kDy},
        {"gemm gradients", 0}}},
      {"tensorwise",
       {{"quantize x,w", 4 * (kX + kW)},
        {"gemm output", 0},
        {"quantize dy", 4 * kDy},
        {"gemm gradients", 0}}},
      {"blockwise",
       {{"cast x", 4 * kX},
        {"cast w", 4 * kW},
        {"gemm output", 0},
        {"cast dy", 4 * kDy},
        {"gemm grad_input", 0},
        {"gemm grad_weight", 0}}},
      {"rowwise_with_gw_hp",
       {{"quantize x", 3 * kX},
        {"quantize w", 4 * kW},
        {"gemm output", 0},
        {"quantize dy", 3 * kDy},
        {"gemm grad_input", 0},
        {"gemm grad_weight", 0}}},
  };
  for (const auto& [recipe, expected] : cases) {
    Fixture s(cuda, describe(recipe, {70, 48, 144}), 70);
    s.first_step = false;
    std::vector<Step> steps = s.linear->forward_steps(s.forward());
    for (Step& step : s.linear->backward_steps(s.backward())) {
      steps.push_back(std::move(step));
    }
    ASSERT_EQ(steps.size(), expected.size()) << recipe;
    for (size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(steps[i].name, expected[i].name) << recipe;
      EXPECT_EQ(steps[i].bytes, expected[i].bytes) << recipe << ": " << steps[i].name;
      EXPECT_TRUE(steps[i].launch(nullptr)) << recipe << ": " << steps[i].name;
    }
  }
  EXPECT_TRUE(cuda.faults.empty()) << cuda.faults.front();
}

TEST(LinearMisuse, WhatARecipeNeedsBesides) {
  FakeCuda cuda;
  FakeCublasLt library;
  const auto refused = [](const Status& status, std::string_view part) {
    ASSERT_FALSE(status) << part;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), part)) << status.error().message;
  };
  {
    Fixture s(cuda, describe("rowwise_with_gw_hp", {64, 32, 48}), 64);
    BackwardCall call = s.backward();
    call.x.data = nullptr;
    refused(s.linear->backward(call, nullptr),
            "x.data is NULL; grad_weight is computed from it: recipe rowwise_with_gw_hp");
    call = s.backward();
    call.dw.accumulate = true;
    refused(s.linear->backward(call, nullptr), "accumulate_grad_weight");
    ForwardCall with_bias = s.forward();
    with_bias.bias = s.bias.data();
    refused(s.linear->forward(with_workspace(with_bias, s.workspace.data()), nullptr),
            "float8_linear_desc.bias");
    float8_tensor odd = Fp8Weight(s).view;
    odd.q = static_cast<const uint8_t*>(odd.q) + 4;
    ForwardCall with_weight = s.forward();
    with_weight.w.fp8 = &odd;
    refused(s.linear->forward(with_workspace(with_weight, s.workspace.data()), nullptr), "w.fp8");
  }
  {
    Fixture s(cuda, describe("delayed", {64, 32, 48}), 64);
    ForwardCall forward = s.forward();
    forward.scales = {};
    refused(s.linear->forward(forward, nullptr),
            "float8_forward_args.scales is empty; recipe delayed");
    BackwardCall backward = s.backward();
    backward.scales = {};
    refused(s.linear->backward(backward, nullptr), "scales is empty");
  }
  LinearDesc desc = describe("tensorwise", {64, 32, 48});
  desc.bias = true;
  Fixture s(cuda, desc, 64);
  ForwardCall call = s.forward();
  call.bias = nullptr;
  refused(s.linear->forward(call, nullptr), "bias is NULL");
}

}  // namespace
}  // namespace f8::runtime
