// The linear on the device: forward and backward under each recipe against the reference, the same
// bits every time, and in a CUDA graph.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>

#include "runtime/weight_casts.hpp"
#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

class LinearTest : public RecipeTest {
 protected:
  Status run(const Linear& linear, const Tensors& t, Stream stream = nullptr) {
    F8_TRY(linear.forward(t.forward(), t.workspace.as(), stream));
    return linear.backward(t.backward(), t.workspace.as(), stream);
  }
  static void expect_like_reference(const Linear& linear, const Tensors& t) {
    const Recipe& recipe = linear.desc().recipe;
    const auto expected = reference::linear(recipe, t.x, t.w, t.dy).value();
    const auto bound = [&](Gemm g) { return recipe.at(g).fast ? kFastBound : kPreciseBound; };
    const auto dw = result(t.dw, linear.desc().grad_weight_dtype);
    EXPECT_LE(reference::relative_error(expected.y, t.y.bf16()), bound(Gemm::kOutput));
    EXPECT_LE(reference::relative_error(expected.dx, t.dx.bf16()), bound(Gemm::kGradInput));
    EXPECT_LE(reference::relative_error(expected.dw, dw), bound(Gemm::kGradWeight));
    t.expect_whole_guards();
  }
};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearTest, LikeTheReference) {
  struct Case {
    Shape shape;
    int64_t m;
  };
  for (const auto& [shape, m] : {Case{{300, 208, 592}, 300},       // whole plan
                                 Case{{300, 208, 592}, 17},        // fewer rows than planned
                                 Case{{300, 208, 592}, 1},         //
                                 Case{{1, 16, 16}, 1},             // smallest
                                 Case{{1000, 2064, 48}, 1000},     // wide
                                 Case{{1000, 48, 2064}, 999},      // narrow
                                 Case{{4095, 128, 144}, 4095}}) {  // a long contraction for dw
    const uint64_t seed = static_cast<uint64_t>(shape.m + m);
    SCOPED_TRACE(fmt::format("linear/{} {} called with m={} seed {}", GetParam(), to_string(shape),
                             m, seed));
    const auto linear = plan(describe(GetParam(), shape));
    ASSERT_NE(linear, nullptr);
    Tensors t(context(), *linear, m, seed);
    F8_ASSERT_OK(linear->forward(t.forward(), t.workspace.as(), nullptr));
    F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
    t.workspace.poison();  // scratch: nothing of it may survive a call
    F8_ASSERT_OK(linear->backward(t.backward(), t.workspace.as(), nullptr));
    expect_like_reference(*linear, t);
    if (HasFailure()) return;
  }
}

TEST_P(LinearTest, Fp32WeightGradient) {
  LinearDesc desc = describe(GetParam(), {300, 208, 592});
  desc.grad_weight_dtype = Dtype::kF32;
  const auto linear = plan(desc);
  ASSERT_NE(linear, nullptr);
  const Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(run(*linear, t));
  expect_like_reference(*linear, t);
}

TEST_P(LinearTest, OneGradientAlone) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(run(*linear, t));
  const Bits both = results(t);
  t.poison_results();
  F8_ASSERT_OK(linear->forward(t.forward(), t.workspace.as(), nullptr));
  BackwardCall call = t.backward();
  call.dw = nullptr;
  F8_ASSERT_OK(linear->backward(call, t.workspace.as(), nullptr));
  EXPECT_EQ(t.dx.download<uint8_t>(), both[1]);
  EXPECT_TRUE(
      std::ranges::all_of(t.dw.download<uint8_t>(), [](uint8_t b) { return b == kPoison; }));
  t.dx.poison();
  call = t.backward();
  call.dx = nullptr;
  F8_ASSERT_OK(linear->backward(call, t.workspace.as(), nullptr));
  EXPECT_EQ(t.dw.download<uint8_t>(), both[2]);
  EXPECT_TRUE(
      std::ranges::all_of(t.dx.download<uint8_t>(), [](uint8_t b) { return b == kPoison; }));
}

TEST_P(LinearTest, AForwardWithoutBackwardGivesTheSame) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(linear->forward(t.forward(), t.workspace.as(), nullptr));
  const auto y = t.y.download<uint8_t>();
  t.poison_results();
  ForwardCall call = t.forward();
  call.saved = nullptr;
  F8_ASSERT_OK(linear->forward(call, t.workspace.as(), nullptr));
  EXPECT_EQ(t.y.download<uint8_t>(), y);
}

TEST_P(LinearTest, AnEmptyBatch) {
  const auto linear = plan(describe(GetParam(), {64, 48, 80}));
  ASSERT_NE(linear, nullptr);
  const Tensors t(context(), *linear, 64, 5);
  F8_ASSERT_OK(linear->forward({.m = 0}, nullptr, nullptr));
  F8_ASSERT_OK(linear->backward({.dw = t.dw.as(), .m = 0}, nullptr, nullptr));
  EXPECT_TRUE(std::ranges::all_of(t.dw.download<uint8_t>(), [](uint8_t b) { return b == 0; }));
  EXPECT_TRUE(t.dw.guards_are_whole());
}

// Back to back, without a pause in which an early start of the next kernel could hide.
TEST_P(LinearTest, SameBitsEveryTime) {
  const auto shape = by_device<Shape>({2048, 1024, 1024}, {256, 144, 128});
  const auto linear = plan(describe(GetParam(), shape));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, shape.m, 5);
  F8_ASSERT_OK(run(*linear, t));
  const Bits first = results(t);
  t.poison_results();
  for (int i = 0; i < by_device(20, 3); ++i) F8_ASSERT_OK(run(*linear, t));
  EXPECT_EQ(results(t), first);
}

TEST_P(LinearTest, StepsAreTheSameWork) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(run(*linear, t));
  const Bits whole = results(t);
  t.poison_results();
  for (const auto& step : linear->forward_steps(t.forward(), t.workspace.as())) {
    F8_ASSERT_OK(step.launch(nullptr));
  }
  for (const auto& step : linear->backward_steps(t.backward(), t.workspace.as())) {
    F8_ASSERT_OK(step.launch(nullptr));
  }
  EXPECT_EQ(results(t), whole);
}

// Captured once, replayed with other inputs in the same memory.
TEST_P(LinearTest, InAGraph) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  const Tensors other(context(), *linear, 300, 77);
  F8_ASSERT_OK(run(*linear, other));
  const Bits expected = results(other);

  const DeviceStream stream(context());
  const auto ok = [&](CUresult result, const char* call) { return driver().check(result, call); };
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  F8_ASSERT_OK(ok(driver().stream_begin_capture(stream.get(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                  "cuStreamBeginCapture"));
  const Status captured = run(*linear, t, stream.get());
  F8_ASSERT_OK(ok(driver().stream_end_capture(stream.get(), &graph), "cuStreamEndCapture"));
  F8_ASSERT_OK(captured);
  F8_ASSERT_OK(ok(driver().graph_instantiate(&exec, graph, 0), "cuGraphInstantiate"));

  for (const Tensors* inputs : {static_cast<const Tensors*>(&t), &other}) {
    const auto copy = [&](DeviceBuffer& to, const reference::Matrix& from) {
      const auto bits = reference::to_bf16_bits(from);
      to.upload(bits.data(), bits.size() * 2);
    };
    copy(t.device_x, inputs->x);
    copy(t.device_w, inputs->w);
    copy(t.device_dy, inputs->dy);
    t.poison_results();
    F8_ASSERT_OK(ok(driver().ctx_synchronize(), "cuCtxSynchronize"));
    F8_ASSERT_OK(ok(driver().graph_launch(exec, stream.get()), "cuGraphLaunch"));
    stream.synchronize();
  }
  EXPECT_EQ(results(t), expected);
  t.expect_whole_guards();
  F8_ASSERT_OK(ok(driver().graph_exec_destroy(exec), "cuGraphExecDestroy"));
  F8_ASSERT_OK(ok(driver().graph_destroy(graph), "cuGraphDestroy"));
}

TEST_P(LinearTest, ByCublasLt) {
  if (const auto version = cublaslt_version(); !kEmulated && !version) {
    GTEST_SKIP() << version.error().message;
  }
  const std::string recipe = GetParam();
  if (recipe == "rowwise_with_gw_hp" || recipe == "blockwise") {
    GTEST_SKIP() << "cuBLASLt does not mix a tensor's and rows' scales, and pads blocks otherwise";
  }
  LinearDesc desc = describe(recipe, {300, 208, 592});
  for (auto& choice : desc.choices) choice = parse_choice(Provider::kCublasLt, "h0").value();
  const auto linear = plan(desc);
  ASSERT_NE(linear, nullptr);
  for (const int64_t m : {300, 17}) {
    SCOPED_TRACE(m);
    const Tensors t(context(), *linear, m, 5);
    F8_ASSERT_OK(run(*linear, t));
    expect_like_reference(*linear, t);
  }
}

TEST_P(LinearTest, NanInTheInputReachesTheOutput) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  t.x.values[17 * 592 + 3] = std::numeric_limits<float>::quiet_NaN();
  const auto bits = reference::to_bf16_bits(t.x);
  t.device_x.upload(bits.data(), bits.size() * 2);
  F8_ASSERT_OK(run(*linear, t));
  const auto y = t.y.bf16();
  const GemmSetting& output = linear->desc().recipe.at(Gemm::kOutput);
  const bool all = output.a.granularity == Granularity::kTensor;
  for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(std::isnan(y[i]), all || i / 208 == 17) << i;
}

TEST_P(LinearTest, AWeightCacheGivesTheSame) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(run(*linear, t));
  const Bits plain = results(t);
  const DeviceBuffer cache(context(), linear->weight_cache_bytes());
  const WeightCall weight{
      .w = t.device_w.as(), .cache = cache.as(), .scales = t.slots, .first_step = t.first_step};
  F8_ASSERT_OK(linear->cast_weight(weight, t.workspace.as(), nullptr));
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    t.poison_results();
    ForwardCall forward = t.forward();
    forward.w = nullptr;
    forward.weight_cache = cache.as();
    F8_ASSERT_OK(linear->forward(forward, t.workspace.as(), nullptr));
    BackwardCall backward = t.backward();
    backward.weight_cache = cache.as();
    F8_ASSERT_OK(linear->backward(backward, t.workspace.as(), nullptr));
    EXPECT_EQ(results(t), plain);
  }
  EXPECT_TRUE(cache.guards_are_whole());
  t.expect_whole_guards();
}

TEST_P(LinearTest, WeightsOfAModelAtOnce) {
  std::vector<std::shared_ptr<const Linear>> linears;
  std::vector<std::unique_ptr<Tensors>> tensors;
  std::vector<std::unique_ptr<DeviceBuffer>> caches;
  std::vector<WeightCall> calls;
  for (int64_t i = 0; i < 33; ++i) {
    const Shape shape{16, 16 * (1 + i * 7 % 30), 16 * (1 + i * 5 % 40)};
    linears.push_back(plan(describe(GetParam(), shape)));
    ASSERT_NE(linears.back(), nullptr);
    tensors.push_back(
        std::make_unique<Tensors>(context(), *linears.back(), 16, static_cast<uint64_t>(i)));
    caches.push_back(
        std::make_unique<DeviceBuffer>(context(), linears.back()->weight_cache_bytes()));
    const Tensors& t = *tensors.back();
    calls.push_back({.w = t.device_w.as(),
                     .cache = caches.back()->as(),
                     .scales = t.slots,
                     .first_step = t.first_step});
  }
  const auto casts = WeightCasts::plan(context_, linears);
  F8_ASSERT_OK(casts);
  const DeviceBuffer workspace(context(), std::max<size_t>(casts->workspace_bytes(), 16));
  for (int round = 0; round < 3; ++round) {
    F8_ASSERT_OK(casts->run(calls, workspace.as(), nullptr));
  }
  EXPECT_TRUE(workspace.guards_are_whole());
  for (size_t i = 0; i < linears.size(); ++i) {
    const auto together = caches[i]->download<uint8_t>();
    EXPECT_TRUE(caches[i]->guards_are_whole());
    caches[i]->poison();
    F8_ASSERT_OK(linears[i]->cast_weight(calls[i], tensors[i]->workspace.as(), nullptr));
    EXPECT_EQ(caches[i]->download<uint8_t>(), together) << to_string(linears[i]->desc().shape);
  }
}

TEST_P(LinearTest, BiasAndAccumulation) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF32}) {
    LinearDesc desc = describe(GetParam(), {300, 208, 592});
    desc.grad_weight_dtype = type;
    desc.bias = true;
    desc.accumulate_grad_weight = true;
    const auto linear = plan(desc);
    ASSERT_NE(linear, nullptr);
    const Tensors t(context(), *linear, 300, 5);
    F8_ASSERT_OK(run(*linear, t));
    auto expected = reference::linear(desc.recipe, t.x, t.w, t.dy).value();
    for (size_t i = 0; i < expected.y.size(); ++i) {
      expected.y[i] += static_cast<double>(t.bias.values[i % 208]);
    }
    EXPECT_LE(reference::relative_error(expected.y, t.y.bf16()), kFastBound);
    BackwardCall again = t.backward();
    again.accumulate = true;
    F8_ASSERT_OK(linear->backward(again, t.workspace.as(), nullptr));
    for (double& v : expected.dw) v *= 2;
    EXPECT_LE(reference::relative_error(expected.dw, result(t.dw, type)), 2 * kPreciseBound);
    t.expect_whole_guards();
  }
}

// Steps of delayed scaling against the reference: scales bitwise, results within the bounds.
TEST_F(GpuTest, DelayedScalingStepByStep) {
  const auto linear = Linear::plan(context_, describe("delayed", {300, 208, 592})).value();
  const DelayedOptions options{.history = 3};
  const auto scales = DelayedScales::plan(context_, linear->scale_slots(), options).value();
  const DeviceBuffer state(context(), scales.bytes());
  F8_ASSERT_OK(scales.init(state.as(), nullptr));
  std::array<reference::DelayedState, 3> states;
  for (int step = 0; step < 6; ++step) {
    Tensors t(context(), *linear, 300, static_cast<uint64_t>(100 + step));
    t.slots = scales.slots(state.as(), 0);
    t.first_step = step == 0;
    F8_ASSERT_OK(linear->forward(t.forward(), t.workspace.as(), nullptr));
    F8_ASSERT_OK(linear->backward(t.backward(), t.workspace.as(), nullptr));
    reference::DelayedAmax scaled_by;
    if (step > 0) {
      scaled_by = {448.0F / states[0].scale, 448.0F / states[1].scale, 57344.0F / states[2].scale};
    }
    const auto expected =
        reference::linear(linear->desc().recipe, t.x, t.w, t.dy, scaled_by).value();
    EXPECT_LE(reference::relative_error(expected.y, t.y.bf16()), kFastBound) << step;
    EXPECT_LE(reference::relative_error(expected.dx, t.dx.bf16()), 2 * kPreciseBound) << step;
    EXPECT_LE(reference::relative_error(expected.dw, t.dw.bf16()), 2 * kPreciseBound) << step;
    F8_ASSERT_OK(scales.update(state.as(), nullptr));
    const auto words = state.download<float>();
    const auto first = static_cast<size_t>(t.slots.scale - state.as<float>());
    const reference::Matrix* tensors[] = {&t.x, &t.w, &t.dy};
    for (size_t i = 0; i < states.size(); ++i) {
      states[i].amax =
          std::bit_cast<uint32_t>(reference::amax(*tensors[i], reference::AmaxOver::kTensor)[0]);
      reference::scale_update(linear->scale_slots()[i], options, states[i]);
      EXPECT_EQ(words[first + i * 8], states[i].scale) << "step " << step << " slot " << i;
      EXPECT_EQ(words[first + i * 8 + 4], 1.0F / states[i].scale);
      EXPECT_EQ(words[i], 0.0F) << "the amax is cleared";
    }
  }
  EXPECT_TRUE(state.guards_are_whole());
}

// Every path of the update, many slots at once, bitwise.
TEST_F(GpuTest, ScaleUpdateLikeTheReference) {
  std::vector<DelayedSlot> slots;
  for (size_t i = 0; i < 1000; ++i) {
    slots.push_back({i % 3 == 0 ? Dtype::kE5m2 : Dtype::kE4m3, i % 2 == 0});
  }
  for (const DelayedOptions& options :
       {DelayedOptions{}, DelayedOptions{.history = 1, .margin = 3},
        DelayedOptions{
            .history = 4, .scale_from = ScaleFrom::kMostRecent, .non_finite = NonFinite::kHold}}) {
    const auto scales = DelayedScales::plan(context_, slots, options).value();
    DeviceBuffer state(context(), scales.bytes());
    F8_ASSERT_OK(scales.init(state.as(), nullptr));
    std::vector<reference::DelayedState> expected(slots.size());
    const auto first = static_cast<size_t>(scales.slots(state.as(), 0).scale - state.as<float>());
    for (uint64_t step = 0; step < 20; ++step) {
      const auto random = reference::random_matrix(1, 1000, step);
      auto words = state.download<uint32_t>();
      for (size_t i = 0; i < slots.size(); ++i) {
        uint32_t amax = std::bit_cast<uint32_t>(
            std::ldexp(std::abs(random.values[i]), static_cast<int>(i % 200) - 100));
        if (i % 7 == step % 7) amax = 0;
        if (i % 11 == step) amax = 0x7f800000;
        if (i % 13 == step) amax = 0x7fc00000;
        words[i] = expected[i].amax = amax;
        reference::scale_update(slots[i], options, expected[i]);
      }
      state.upload(words.data(), words.size() * 4);
      F8_ASSERT_OK(scales.update(state.as(), nullptr));
      const auto after = state.download<float>();
      for (size_t i = 0; i < slots.size(); ++i) {
        const float scale = after[first + i * 8];
        if (std::isnan(scale) && std::isnan(expected[i].scale)) continue;
        ASSERT_EQ(std::bit_cast<uint32_t>(scale), std::bit_cast<uint32_t>(expected[i].scale))
            << "step " << step << " slot " << i;
      }
    }
  }
}

TEST_P(LinearTest, MisuseLeavesTheDeviceUsable) {
  const auto linear = plan(describe(GetParam(), {64, 48, 80}));
  ASSERT_NE(linear, nullptr);
  const Tensors t(context(), *linear, 64, 5);
  ForwardCall call = t.forward();
  call.x = nullptr;
  EXPECT_EQ(linear->forward(call, t.workspace.as(), nullptr).error().code,
            ErrorCode::kInvalidArgument);
  call = t.forward();
  call.m = 65;
  EXPECT_EQ(linear->forward(call, t.workspace.as(), nullptr).error().code,
            ErrorCode::kInvalidArgument);
  call = t.forward();
  call.y = t.y.as<uint8_t>() + 2;
  EXPECT_EQ(linear->forward(call, t.workspace.as(), nullptr).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(linear->forward(t.forward(), nullptr, nullptr).error().code,
            ErrorCode::kInvalidArgument);
  F8_ASSERT_OK(run(*linear, t));
}

// Axis scales by two launches: by lines, and beyond their limit the input's and grad_output's by
// words. The weight's are compared to those of a list, which takes words; what the reference would
// take minutes for, on elements here and there to products in high precision.
TEST_F(GpuTest, LargeRowwiseLinears) {
  struct Case {
    Shape shape;
    int64_t m;
    bool clears;
  };
  const auto two_launches =
      *Context::create(context().device().ordinal,
                       {.cooperative_launch = false, .emulate = context().options().emulate});
  for (const auto& [shape, m, clears] :
       {Case{by_device<Shape>({4200, 2304, 2048}, {4200, 48, 32}), 4200, false},
        Case{by_device<Shape>({16384, 256, 256}, {16384, 16, 16}), 16384, true},
        Case{by_device<Shape>({16384, 256, 256}, {16384, 16, 16}), 78 * 128, false}}) {
    SCOPED_TRACE(fmt::format("{} called with m={}", to_string(shape), m));
    const auto planned = Linear::plan(two_launches, describe("rowwise", shape));
    F8_ASSERT_OK(planned);
    const Linear& linear = **planned;
    Tensors t(context(), linear, m, 5);
    for (const auto& steps : {linear.forward_steps(t.forward(), t.workspace.as()),
                              linear.backward_steps(t.backward(), t.workspace.as())}) {
      EXPECT_EQ(std::ranges::any_of(steps, [](const Step& s) { return s.name == "clear amax"; }),
                clears);
      EXPECT_TRUE(
          std::ranges::any_of(steps, [](const Step& s) { return s.name.starts_with("amax"); }));
    }
    Bits first;
    for (int round = 0; round < 3; ++round) {
      t.poison_results();
      F8_ASSERT_OK(linear.forward(t.forward(), t.workspace.as(), nullptr));
      F8_ASSERT_OK(linear.backward(t.backward(), t.workspace.as(), nullptr));
      if (round == 0) first = results(t);
    }
    EXPECT_TRUE(results(t) == first) << "other bits the second time";
    t.expect_whole_guards();

    const auto [n, k] = std::pair{shape.n, shape.k};
    const auto y = t.y.bf16();
    const auto dx = t.dx.bf16();
    const auto dw = result(t.dw, linear.desc().grad_weight_dtype);
    const auto near = [](int64_t count, int64_t rows, int64_t cols, const auto& computed,
                         const auto& term) {
      std::vector<double> exact;
      std::vector<double> found;
      for (int64_t i = 0; i < 300; ++i) {
        const int64_t row = i * 7919 % rows;
        const int64_t col = i * 104729 % cols;
        double sum = 0;
        for (int64_t j = 0; j < count; ++j) sum += term(row, col, j);
        exact.push_back(sum);
        found.push_back(computed[static_cast<size_t>(row * cols + col)]);
      }
      return reference::relative_error(exact, found) <= 0.06;
    };
    const auto at = [](const reference::Matrix& x, int64_t r, int64_t c) {
      return static_cast<double>(x.at(r, c));
    };
    EXPECT_TRUE(near(k, m, n, y, [&](int64_t r, int64_t c, int64_t j) {
      return at(t.x, r, j) * at(t.w, c, j);
    })) << "y";
    EXPECT_TRUE(near(n, m, k, dx, [&](int64_t r, int64_t c, int64_t j) {
      return at(t.dy, r, j) * at(t.w, j, c);
    })) << "dx";
    EXPECT_TRUE(near(m, n, k, dw, [&](int64_t r, int64_t c, int64_t j) {
      return at(t.dy, j, r) * at(t.x, j, c);
    })) << "dw";

    const DeviceBuffer cache(context(), linear.weight_cache_bytes());
    const DeviceBuffer by_list(context(), linear.weight_cache_bytes());
    WeightCall weight{.w = t.device_w.as(), .cache = cache.as()};
    F8_ASSERT_OK(linear.cast_weight(weight, t.workspace.as(), nullptr));
    const auto casts = WeightCasts::plan(two_launches, {&*planned, 1});
    F8_ASSERT_OK(casts);
    const DeviceBuffer workspace(context(), std::max<size_t>(casts->workspace_bytes(), 16));
    weight.cache = by_list.as();
    F8_ASSERT_OK(casts->run({&weight, 1}, workspace.as(), nullptr));
    EXPECT_TRUE(cache.download<uint8_t>() == by_list.download<uint8_t>());
    if (HasFailure()) return;
  }
}

// The caller's current context, whatever it is, is the same after a call.
TEST_F(GpuTest, RunsFromAThreadWithoutAContext) {
  const auto linear = Linear::plan(context_, describe("tensorwise", {64, 48, 80}));
  F8_ASSERT_OK(linear);
  const Tensors t(context(), **linear, 64, 5);
  F8_ASSERT_OK(driver().check(driver().ctx_set_current(nullptr), "cuCtxSetCurrent"));
  const Status forward = (*linear)->forward(t.forward(), t.workspace.as(), nullptr);
  CUcontext after = nullptr;
  driver().ctx_get_current(&after);
  F8_ASSERT_OK(context().make_current());
  F8_ASSERT_OK(forward);
  EXPECT_EQ(after, nullptr);
  EXPECT_LE(reference::relative_error(reference::matmul(t.x, t.w), t.y.bf16()), 0.06);
}

// One plan, a stream and buffers for each thread.
TEST_P(LinearTest, FromSeveralThreadsOnSeveralStreams) {
  constexpr size_t kThreads = 4;
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  struct Worker {
    Worker(const Context& context, const Linear& linear, uint64_t seed)
        : tensors(context, linear, 300, seed), stream(context) {}
    Tensors tensors;
    DeviceStream stream;
    Bits alone;
    Status status;
  };
  std::vector<std::unique_ptr<Worker>> workers;
  for (size_t i = 0; i < kThreads; ++i) {
    workers.push_back(std::make_unique<Worker>(context(), *linear, 10 * i + 5));
    Worker& worker = *workers.back();
    F8_ASSERT_OK(run(*linear, worker.tensors));
    worker.alone = results(worker.tensors);
    worker.tensors.poison_results();
  }
  F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
  {
    std::vector<std::jthread> threads;
    for (const auto& worker : workers) {
      threads.emplace_back([&, worker = worker.get()] {
        for (int i = 0; i < by_device(50, 3) && worker->status; ++i) {
          worker->status = run(*linear, worker->tensors, worker->stream.get());
        }
      });
    }
  }
  for (const auto& worker : workers) {
    F8_ASSERT_OK(worker->status);
    worker->stream.synchronize();
    EXPECT_EQ(results(worker->tensors), worker->alone);
    worker->tensors.expect_whole_guards();
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
