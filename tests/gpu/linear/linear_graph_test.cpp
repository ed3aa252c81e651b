// Linears in CUDA graphs: captured once, replayed with other inputs in the same memory.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

class LinearGraphTest : public RecipeTest {
 protected:
  // `from`'s inputs into the memory of `to`.
  static void take_inputs(Tensors& to, const Tensors& from) {
    const auto copy = [](DeviceBuffer& buffer, const reference::Matrix& values) {
      const auto bits = reference::to_bf16_bits(values);
      buffer.upload(bits.data(), bits.size() * 2);
    };
    copy(to.device_x, from.x);
    copy(to.device_w, from.w);
    copy(to.device_dy, from.dy);
  }
};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearGraphTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearGraphTest, ReplaysWithOtherInputs) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  const Tensors other(context(), *linear, 300, 77);
  F8_ASSERT_OK(run(*linear, t));
  F8_ASSERT_OK(run(*linear, other));
  const std::array<Bits, 2> expected{results(t), results(other)};

  const DeviceStream stream(context());
  const DeviceGraph graph(context(), stream, [&] { return run(*linear, t, stream.get()); });
  take_inputs(t, other);
  t.poison_results();
  graph.replay();
  EXPECT_EQ(results(t), expected[1]);
  const Tensors first(context(), *linear, 300, 5);
  take_inputs(t, first);
  t.poison_results();
  graph.replay();
  EXPECT_EQ(results(t), expected[0]);
  t.expect_whole_guards();
}

// Layouts of one workspace follow the M of a call and the linear: what one call leaves there lies
// where another has something else, in any order and at once behind each other.
TEST_P(LinearGraphTest, LayoutsAlternateOnOneWorkspace) {
  const auto linear_of = [&](Shape shape) { return plan(describe(GetParam(), shape)); };
  const std::array shapes = {Shape{300, 208, 592},
                             by_device<Shape>({1100, 576, 320}, {200, 96, 112})};
  const std::array linears = {linear_of(shapes[0]), linear_of(shapes[1])};
  ASSERT_TRUE(linears[0] != nullptr && linears[1] != nullptr);
  struct Call {
    const Linear* linear;
    std::unique_ptr<Tensors> tensors, other;
    std::array<Bits, 2> alone;
  };
  std::vector<Call> calls;
  for (const auto& [index, m] :
       {std::pair<int, int64_t>{0, 300}, {0, 17}, {1, shapes[1].m}, {0, 129}, {1, 1}}) {
    const Linear& linear = *linears[static_cast<size_t>(index)];
    const auto tensors = [&](uint64_t seed) {
      return std::make_unique<Tensors>(context(), linear, m, seed + static_cast<uint64_t>(m));
    };
    Call call{&linear, tensors(5), tensors(77), {}};
    F8_ASSERT_OK(run(linear, *call.tensors));
    F8_ASSERT_OK(run(linear, *call.other));
    call.alone = {results(*call.tensors), results(*call.other)};
    calls.push_back(std::move(call));
  }

  const DeviceBuffer workspace(
      context(), std::max(linears[0]->workspace_bytes(), linears[1]->workspace_bytes()));
  const DeviceStream stream(context());
  // All forwards, then all backwards in the opposite order, as a model's.
  const DeviceGraph graph(context(), stream, [&]() -> Status {
    for (const Call& call : calls) {
      F8_TRY(call.linear->forward(with_workspace(call.tensors->forward(), workspace.as()),
                                  stream.get()));
    }
    for (size_t i = calls.size(); i-- > 0;) {
      const Call& call = calls[i];
      F8_TRY(call.linear->backward(with_workspace(call.tensors->backward(), workspace.as()),
                                   stream.get()));
    }
    return {};
  });
  for (const bool changed : {false, true, true}) {
    for (Call& call : calls) {
      if (changed) take_inputs(*call.tensors, *call.other);
      call.tensors->poison_results();
    }
    graph.replay();
    for (const Call& call : calls) {
      SCOPED_TRACE(f8::format("{} m={}", to_string(call.linear->desc().shape), call.tensors->m));
      EXPECT_EQ(results(*call.tensors), call.alone[changed ? 1 : 0]);
      call.tensors->expect_whole_guards();
    }
  }
  EXPECT_TRUE(workspace.guards_are_whole());
}

// A step as a trainer captures it: the weight cast and flagged, two micro-batches whose gradients
// add up, counters, the scales' update, the flag taken back. Replayed, it leaves what the same
// calls leave one by one.
TEST_P(LinearGraphTest, AWholeStepWithItsState) {
  LinearDesc desc = describe(GetParam(), {300, 208, 592});
  desc.accumulate_grad_weight = desc.count = true;
  desc.grad_weight_dtype = Dtype::kF32;
  const auto linear = plan(desc);
  ASSERT_NE(linear, nullptr);
  const auto scales = DelayedScales::plan(context_, linear->scale_slots(), {.history = 2}).value();
  QuantizerDesc of_weight = weight_of(desc);
  of_weight.noop_flag = true;
  struct Run {
    Run(const std::shared_ptr<Context>& on, const Linear& linear, const DelayedScales& scales,
        const QuantizerDesc& of_weight)
        : context(*on),
          t(context, linear, 300, 5),
          weight(on, of_weight),
          state(context, scales.bytes()),
          counters(context, std::vector<uint8_t>(kCountersOfLinear * sizeof(CastCounters))),
          noop_flag(context, std::vector<uint32_t>{0}),
          stream(context) {
      if (scales.count() == 0) return;
      EXPECT_TRUE(scales.init(state.as(), stream.get()));
      t.slots = scales.slots(state.as(), 0);
    }
    [[nodiscard]] Bits all() const {
      Bits bits = results(t);
      for (const DeviceBuffer* buffer : {&weight.tensor, &state, &counters, &noop_flag}) {
        EXPECT_TRUE(buffer->guards_are_whole());
        bits.push_back(buffer->download<uint8_t>());
      }
      return bits;
    }
    const Context& context;
    Tensors t;
    Fp8Weight weight;
    DeviceBuffer state, counters, noop_flag;
    DeviceStream stream;
  };
  const auto step = [&](const Run& r, bool first) -> Status {
    auto* const counters = r.counters.as<CastCounters>();
    for (const bool later : {false, true}) {
      QuantizeCall cast = r.weight.call(r.t);
      cast.step = first_step_if(first);
      cast.counters = counters;
      cast.noop_flag = r.noop_flag.as<uint32_t>();
      F8_TRY(r.weight.Quantized::run(cast, r.stream.get()));
      ForwardCall forward = r.t.forward();
      BackwardCall backward = r.t.backward();
      forward.w.fp8 = backward.w.fp8 = &r.weight.w_tensor;
      forward.step = backward.step = first_step_if(first);
      forward.counters = backward.counters = counters;
      backward.dw.accumulate = later;
      F8_TRY(linear->forward(forward, r.stream.get()));
      F8_TRY(linear->backward(backward, r.stream.get()));
    }
    F8_TRY(scales.update(r.state.as(), r.stream.get()));
    return set_words(driver(), r.noop_flag.as<uint32_t>(), 0, 1, r.stream.get());
  };
  Run direct(context_, *linear, scales, of_weight);
  Run replayed(context_, *linear, scales, of_weight);
  F8_ASSERT_OK(step(direct, true));
  F8_ASSERT_OK(step(replayed, true));
  direct.stream.synchronize();
  replayed.stream.synchronize();
  const DeviceGraph graph(context(), replayed.stream, [&] { return step(replayed, false); });
  for (const uint64_t seed : {6, 7, 8}) {
    const Tensors inputs(context(), *linear, 300, seed);
    take_inputs(direct.t, inputs);
    take_inputs(replayed.t, inputs);
    F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
    F8_ASSERT_OK(step(direct, false));
    direct.stream.synchronize();
    graph.replay();
    EXPECT_EQ(replayed.all(), direct.all()) << seed;
  }
  if (linear->desc().recipe.at(Gemm::kOutput).is_fp8()) {
    // Eight micro-batches of four steps.
    EXPECT_EQ(replayed.counters.download<CastCounters>()[0].elements, 8U * 300 * 592);
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
