#include "runtime/linear/linear.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/linear/plan/kernels.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::describe;
using testing::FakeCuda;
using testing::Fixture;
using testing::says;

class LinearTest : public ::testing::TestWithParam<const char*> {
 protected:
  void expect_no_faults() { EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front(); }
  FakeCuda cuda_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearTest, ::testing::Values("tensorwise", "rowwise"));

TEST_P(LinearTest, SkipsTheGradientThatIsNotWanted) {
  Fixture s(cuda_, describe(GetParam(), {64, 32, 48}), 64);
  ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
  const auto expected = reference::linear(s.linear->desc().recipe, s.xm, s.wm, s.dym).value();
  const size_t before = cuda_.launches.size();

  BackwardCall no_dw = s.backward();
  no_dw.dw.data = nullptr;
  ASSERT_TRUE(s.linear->backward(with_workspace(no_dw, s.workspace.data()), nullptr));
  EXPECT_EQ(cuda_.launches.size(), before + 2);
  EXPECT_NE(cuda_.launches[before].kernel.find("/q"), std::string_view::npos);
  EXPECT_EQ(cuda_.launches[before].kernel.find("qt"), std::string::npos);
  EXPECT_TRUE(s.dw.untouched());
  EXPECT_LT(reference::relative_error(expected.dx, s.dx.bf16()), 2.5e-3);

  BackwardCall no_dx = s.backward();
  no_dx.dx.data = nullptr;
  ASSERT_TRUE(s.linear->backward(with_workspace(no_dx, s.workspace.data()), nullptr));
  EXPECT_EQ(cuda_.launches.size(), before + 4);
  EXPECT_NE(cuda_.launches[before + 2].kernel.find("/qt"), std::string::npos);
  EXPECT_LT(reference::relative_error(expected.dw, s.dw.bf16()), 2.5e-3);

  BackwardCall neither = s.backward();
  neither.dx.data = neither.dw.data = nullptr;
  ASSERT_TRUE(s.linear->backward(with_workspace(neither, nullptr), nullptr));
  EXPECT_EQ(cuda_.launches.size(), before + 4);
  expect_no_faults();
}

TEST_P(LinearTest, AForwardWithoutBackwardKeepsNothing) {
  Fixture s(cuda_, describe(GetParam(), {64, 32, 48}), 50);
  ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
  const auto y = s.y.bf16();
  Fixture bare(cuda_, describe(GetParam(), {64, 32, 48}), 50);
  ForwardCall call = bare.forward();
  call.saved.data = nullptr;
  ASSERT_TRUE(bare.linear->forward(with_workspace(call, bare.workspace.data()), nullptr));
  EXPECT_EQ(bare.y.bf16(), y);
  EXPECT_TRUE(bare.saved.untouched());
  EXPECT_TRUE(bare.workspace.guard_is_whole());
  expect_no_faults();
}

TEST_P(LinearTest, AnEmptyBatchLaunchesNothing) {
  Fixture s(cuda_, describe(GetParam(), {64, 32, 48}), 64);
  const size_t before = cuda_.launches.size();
  ASSERT_TRUE(s.linear->forward({.m = 0}, nullptr));
  ASSERT_TRUE(s.linear->backward({.m = 0, .dw = {s.dw.data()}}, nullptr));
  EXPECT_EQ(cuda_.launches.size(), before);
  for (const double v : s.dw.bf16()) ASSERT_EQ(v, 0);
  EXPECT_TRUE(s.dw.guard_is_whole());
}

// Tensors of more tiles than fit the device at once, or a context without cooperative launches: the
// maxima first, then the copies; tensors that do not fit together: one after the other. To the same
// bits.
TEST_P(LinearTest, LargeTensorsTakeMoreLaunches) {
  const auto run = [&](bool cooperative, int sm_count) {
    cuda_.sm_count = sm_count;
    cuda_.cooperative = cooperative;
    Fixture s(cuda_, describe(GetParam(), {300, 144, 400}), 300);
    EXPECT_TRUE(s.linear->forward(s.forward(), nullptr));
    EXPECT_TRUE(s.linear->backward(s.backward(), nullptr));
    expect_no_faults();
    std::vector<std::string> names;
    for (const Step& step : s.linear->forward_steps(s.forward())) names.push_back(step.name);
    return std::tuple(s.y.bf16(), s.dx.bf16(), s.dw.bf16(), names);
  };
  const auto one = run(true, 132);
  EXPECT_EQ(std::get<3>(one).front(), "quantize x,w");
  const std::vector<std::string> two{"amax x,w", "cast x,w", "gemm output"};
  const std::vector<std::string> each{"quantize x", "quantize w", "gemm output"};
  // 12 and 8 tiles on 8 and 16 blocks, each with two of them at most.
  for (const auto& [more, names] :
       {std::pair{run(false, 132), two}, {run(true, 2), each}, {run(true, 4), std::get<3>(one)}}) {
    EXPECT_EQ(std::get<0>(more), std::get<0>(one));
    EXPECT_EQ(std::get<1>(more), std::get<1>(one));
    EXPECT_EQ(std::get<2>(more), std::get<2>(one));
    EXPECT_EQ(std::get<3>(more), names);
  }
}

TEST_P(LinearTest, MisuseIsOneClearError) {
  Fixture s(cuda_, describe(GetParam(), {64, 32, 48}), 64);
  const size_t before = cuda_.launches.size();
  const auto refused = [&](const Status& status, std::string_view part) {
    ASSERT_FALSE(status) << part;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), part)) << status.error().message;
  };
  const auto forward = [&](auto change, std::string_view part, bool workspace = true) {
    ForwardCall call = s.forward();
    change(call);
    refused(
        s.linear->forward(with_workspace(call, workspace ? s.workspace.data() : nullptr), nullptr),
        part);
  };
  forward([](ForwardCall& c) { c.x.data = nullptr; }, "float8_forward_args.x.data is NULL");
  forward([](ForwardCall& c) { c.w.data = nullptr; }, "float8_forward_args.w.data is NULL");
  forward([](ForwardCall& c) { c.y.data = nullptr; }, "float8_forward_args.y.data is NULL");
  forward([&](ForwardCall& c) { c.saved.data = s.saved.data() + 4; },
          "float8_forward_args.saved is not aligned");
  forward([](ForwardCall&) {}, "float8_forward_args.workspace.data is NULL", false);
  forward([&](ForwardCall& c) { c.x.data = s.x.data() + 2; },
          "float8_forward_args.x is not aligned");
  forward([&](ForwardCall& c) { c.y.data = s.y.data() + 8; },
          "float8_forward_args.y is not aligned");
  forward([](ForwardCall& c) { c.m = 65; }, "float8_forward_args.m is 65");
  forward([](ForwardCall& c) { c.m = -1; }, "float8_forward_args.m is -1");
  const auto backward = [&](auto change, std::string_view part, bool workspace = true) {
    BackwardCall call = s.backward();
    change(call);
    refused(
        s.linear->backward(with_workspace(call, workspace ? s.workspace.data() : nullptr), nullptr),
        part);
  };
  backward([](BackwardCall& c) { c.dy.data = nullptr; }, "float8_backward_args.dy.data is NULL");
  backward([](BackwardCall& c) { c.saved.data = nullptr; },
           "float8_backward_args.saved.data is NULL");
  backward([](BackwardCall&) {}, "float8_backward_args.workspace.data is NULL", false);
  backward([&](BackwardCall& c) { c.dx.data = s.dx.data() + 2; },
           "float8_backward_args.dx is not aligned");
  backward([&](BackwardCall& c) { c.dw.data = s.dw.data() + 2; },
           "float8_backward_args.dw is not aligned");
  backward([](BackwardCall& c) { c.m = 65; }, "float8_backward_args.m is 65");
  EXPECT_EQ(cuda_.launches.size(), before);

  ForwardCall bad = s.forward();
  bad.x.data = nullptr;
  const auto steps = s.linear->forward_steps(with_workspace(bad, s.workspace.data()));
  ASSERT_EQ(steps.size(), 1U);
  refused(steps.front().launch(nullptr), "x.data is NULL");
}

TEST_P(LinearTest, ALaunchThatFailsStopsTheCall) {
  Fixture s(cuda_, describe(GetParam(), {64, 32, 48}), 64);
  cuda_.launch_result = CUDA_ERROR_ILLEGAL_ADDRESS;
  const Status status = s.linear->forward(s.forward(), nullptr);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kCuda);
  EXPECT_TRUE(says(status.error(), "quantize/")) << status.error().message;
  cuda_.launch_result = CUDA_SUCCESS;
  EXPECT_TRUE(s.linear->forward(s.forward(), nullptr));
  cuda_.cooperative = false;
  Fixture two(cuda_, describe(GetParam(), {64, 32, 48}), 64);
  cuda_.launch_result = CUDA_ERROR_ILLEGAL_ADDRESS;
  const int clears = cuda_.memsets;
  const Status second = two.linear->forward(two.forward(), nullptr);
  ASSERT_FALSE(second);
  EXPECT_TRUE(says(second.error(), "amax/")) << second.error().message;
  EXPECT_LE(cuda_.memsets, clears + 1);
  cuda_.memset_result = CUDA_ERROR_ILLEGAL_ADDRESS;
  EXPECT_FALSE(two.linear->forward(two.forward(), nullptr));
}

TEST_P(LinearTest, EveryLaunchGoesToTheCallersStream) {
  Fixture s(cuda_, describe(GetParam(), {64, 32, 48}), 64);
  const auto stream = reinterpret_cast<Stream>(uintptr_t{0x77});
  const size_t before = cuda_.launches.size();
  ASSERT_TRUE(s.linear->forward(s.forward(), stream));
  ASSERT_TRUE(s.linear->backward(s.backward(), stream));
  EXPECT_EQ(cuda_.launches.size(), before + 4);
  for (size_t i = before; i < cuda_.launches.size(); ++i) {
    EXPECT_EQ(cuda_.launches[i].stream, stream);
  }
  EXPECT_EQ(cuda_.current, nullptr) << "the caller's context is current again";
}

TEST_P(LinearTest, PrewarmKnowsEveryKernelThatAPlanLoads) {
  const LinearDesc desc = describe(GetParam(), {4096, 4096, 4096});
  const auto specs = choose_kernels(desc, nullptr, cuda_.sm_count)->specs();
  const auto linear = Linear::plan(cuda_.context(), desc).value();
  EXPECT_EQ(static_cast<size_t>(cuda_.modules_loaded), specs.size());
  for (const auto& module : cuda_.modules) {
    EXPECT_TRUE(std::any_of(specs.begin(), specs.end(), [&](const auto& spec) {
      return codegen::key(spec) == module->key;
    })) << module->key;
  }
}

TEST(LinearPlan, FixedChoicesAreTaken) {
  FakeCuda cuda;
  LinearDesc desc = describe("tensorwise", {4096, 4096, 4096});
  desc.choices[1] = GemmChoice{parse_gemm_kernel(Provider::kGenerated, "64x64s4c1x1w1g8").value()};
  const auto linear = Linear::plan(cuda.context(), desc).value();
  EXPECT_EQ(config_text(linear->choice(Gemm::kGradInput)), "64x64s4c1x1w1g8");
  EXPECT_NE(config_text(linear->choice(Gemm::kOutput)), "64x64s4c1x1w1g8");
}

TEST(LinearPlan, HighPrecisionIsBf16) {
  FakeCuda cuda;
  LinearDesc desc = describe("rowwise_with_gw_hp", {64, 64, 64});
  desc.recipe.name = "half";
  for (CastSetting* operand : {&desc.recipe.gemms[2].a, &desc.recipe.gemms[2].b}) {
    operand->dtype = Dtype::kF16;
  }
  const auto linear = Linear::plan(cuda.context(), desc);
  ASSERT_FALSE(linear);
  EXPECT_EQ(linear.error().code, ErrorCode::kUnsupported);
  EXPECT_TRUE(says(linear.error(), "recipe half, GEMM grad_weight")) << linear.error().message;
  EXPECT_EQ(cuda.modules_loaded, 0);
}

TEST(LinearPlan, ShapesAreChecked) {
  FakeCuda cuda;
  const auto context = cuda.context();
  for (const Shape shape : {Shape{0, 64, 64}, Shape{64, 24, 64}, Shape{64, 64, 0},
                            Shape{64, 64, -16}, Shape{kMaxDim, kMaxDim, kMaxDim}}) {
    const auto linear = Linear::plan(context, describe("tensorwise", shape));
    ASSERT_FALSE(linear) << to_string(shape);
    EXPECT_EQ(linear.error().code, ErrorCode::kInvalidArgument);
  }
}

// NaN poisons what the contract says it poisons, through the host's plumbing.
TEST(LinearPlan, NanPoisonsItsRowAlone) {
  FakeCuda cuda;
  Fixture s(cuda, describe("rowwise", {20, 32, 48}), 20);
  reinterpret_cast<uint16_t*>(s.x.data())[5 * 48 + 7] = 0x7fc0;
  ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
  const auto y = s.y.bf16();
  for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isnan(y[i]), i / 32 == 5) << i;
}

}  // namespace
}  // namespace f8::runtime
