// The options of a linear beside its GEMMs, on the device: the gradient of the
// bias, holding scales where a tensor is not finite, counting, and heeding the flag of a weight
// that is cast, in a CUDA graph too.
#include <bit>
#include <cmath>
#include <limits>

#include "runtime/linear/plan/kernels.hpp"
#include "runtime/lists/quantizer_list.hpp"
#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"
#include "tests/gpu/quantize/scale_layout.hpp"

namespace f8::runtime::gpu {
namespace {

class LinearOptionsTest : public RecipeTest {
 protected:
  static void put(reference::Matrix& matrix, DeviceBuffer& buffer, int64_t r, int64_t c,
                  float value) {
    matrix.values[static_cast<size_t>(r * matrix.cols + c)] = decode_bf16(encode_bf16(value));
    const auto bits = reference::to_bf16_bits(matrix);
    buffer.upload(bits.data(), bits.size() * 2);
  }
};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearOptionsTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

// Small (a dy that one launch quantizes is read again) and large (a cast leaves the sums).
constexpr Shape kShapes[] = {{300, 208, 592}, {2100, 1040, 1168}, {70000, 272, 128}};

TEST_P(LinearOptionsTest, BiasGradientsAreTheReferencesBits) {
  for (const Shape shape : kShapes) {
    for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      SCOPED_TRACE(f8::format("{} {} {}", GetParam(), to_string(shape), to_string(type)));
      LinearDesc desc = describe(GetParam(), shape);
      desc.bias_grad = true;
      desc.bias_grad_dtype = type;
      const auto linear = plan(desc);
      ASSERT_NE(linear, nullptr);
      const Tensors t(context(), *linear, shape.m - 5, 5);
      const auto sums = reference::column_sums(t.dy);
      const reference::Matrix row{1, shape.n, sums};
      const DeviceBuffer db(context(), sums.size() * size_bytes(type));
      F8_ASSERT_OK(linear->forward(t.forward(), nullptr));
      for (const bool gradients : {true, false}) {
        BackwardCall call = t.backward();
        call.db.data = db.as();
        if (!gradients) call.dx.data = call.dw.data = nullptr;
        F8_ASSERT_OK(linear->backward(call, nullptr));
        EXPECT_EQ(db.download<uint8_t>(), reference::to_bytes(row, type)) << gradients;
        EXPECT_TRUE(db.guards_are_whole());
      }
      BackwardCall again = t.backward();
      again.db.data = db.as();
      again.db.accumulate = true;
      F8_ASSERT_OK(linear->backward(again, nullptr));
      reference::Matrix twice = reference::rounded_to(row, type);
      for (size_t i = 0; i < sums.size(); ++i) twice.values[i] = sums[i] + twice.values[i];
      EXPECT_EQ(db.download<uint8_t>(), reference::to_bytes(twice, type));
      t.expect_whole_guards();

      F8_ASSERT_OK(linear->backward({.m = 0, .db = {db.as()}}, nullptr));
      EXPECT_EQ(db.download<uint8_t>(), std::vector<uint8_t>(db.bytes()));
      if (HasFailure()) return;
    }
  }
}

// A plan with a bias has the same bits in all other results.
TEST_P(LinearOptionsTest, OptionsChangeNoOtherResult) {
  for (const Shape shape : {kShapes[0], kShapes[1]}) {
    SCOPED_TRACE(f8::format("{} {}", GetParam(), to_string(shape)));
    LinearDesc desc = describe(GetParam(), shape);
    const auto plain = plan(desc);
    desc.bias_grad = desc.count = true;
    desc.non_finite = NonFinite::kSaturate;
    const auto linear = plan(desc);
    ASSERT_TRUE(plain != nullptr && linear != nullptr);
    const Tensors expected(context(), *plain, shape.m, 5);
    F8_ASSERT_OK(run(*plain, expected));
    const Tensors t(context(), *linear, shape.m, 5);
    const DeviceBuffer counters(context(),
                                std::vector<uint8_t>(kCountersOfLinear * sizeof(CastCounters)));
    F8_ASSERT_OK(run(*linear, t, nullptr, counters.as<CastCounters>()));
    EXPECT_EQ(results(t), results(expected));
    EXPECT_TRUE(counters.guards_are_whole());
  }
}

TEST_P(LinearOptionsTest, HoldingKeepsResultsFinite) {
  for (const Shape shape : {kShapes[0], kShapes[1]}) {
    SCOPED_TRACE(f8::format("{} {}", GetParam(), to_string(shape)));
    LinearDesc desc = describe(GetParam(), shape);
    desc.non_finite = NonFinite::kSaturate;
    const auto linear = plan(desc);
    ASSERT_NE(linear, nullptr);
    Tensors t(context(), *linear, shape.m, 5);
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    put(t.x, t.device_x, 17, 3, kInfinity);
    put(t.w, t.device_w, 20, 100, -kInfinity);
    put(t.dy, t.device_dy, 150, 7, kInfinity);
    F8_ASSERT_OK(run(*linear, t));
    const auto expected =
        reference::linear(desc.recipe, t.x, t.w, t.dy, {}, NonFinite::kSaturate).value();
    const auto check = [&](Gemm gemm, const std::vector<double>& want, const DeviceBuffer& got) {
      if (!desc.recipe.at(gemm).is_fp8()) return;
      EXPECT_LE(reference::relative_error(want, got.bf16()),
                desc.recipe.at(gemm).fast ? kFastBound : kPreciseBound)
          << to_string(gemm);
    };
    check(Gemm::kOutput, expected.y, t.y);
    check(Gemm::kGradInput, expected.dx, t.dx);
    check(Gemm::kGradWeight, expected.dw, t.dw);
  }
}

TEST_P(LinearOptionsTest, CountersAreTheReferences) {
  for (const Shape shape : {kShapes[0], kShapes[1]}) {
    SCOPED_TRACE(f8::format("{} {}", GetParam(), to_string(shape)));
    LinearDesc desc = describe(GetParam(), shape);
    desc.count = true;
    desc.non_finite = NonFinite::kSaturate;
    const auto linear = plan(desc);
    ASSERT_NE(linear, nullptr);
    Tensors t(context(), *linear, shape.m, 5);
    for (reference::Matrix* matrix : {&t.x, &t.w, &t.dy}) {
      for (int64_t c = 0; c < 16; ++c) {
        matrix->values[static_cast<size_t>(c)] = std::ldexp(1.0F, 14 - 2 * static_cast<int>(c));
      }
    }
    put(t.x, t.device_x, 3, 5, std::numeric_limits<float>::infinity());
    put(t.w, t.device_w, 0, 20, -std::numeric_limits<float>::infinity());
    put(t.dy, t.device_dy, 130, 5, std::numeric_limits<float>::quiet_NaN());
    const DeviceBuffer device(context(),
                              std::vector<uint8_t>(kCountersOfLinear * sizeof(CastCounters)));
    F8_ASSERT_OK(run(*linear, t, nullptr, device.as<CastCounters>()));
    std::array<CastCounters, kCountersOfLinear> counters{};
    F8_ASSERT_OK(snapshot_counters(context(), device.as<CastCounters>(), counters.size(),
                                   counters.data(), nullptr));
    F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
    const LinearKernels kernels = linear_kernels(desc).value();
    const reference::Matrix* tensors[] = {&t.x, &t.w, &t.dy};
    for (size_t i = 0; i < counters.size(); ++i) {
      SCOPED_TRACE(kCounterNames[i]);
      const auto& setting = i % 2 == 0 ? kernels.copies[i / 2].q : kernels.copies[i / 2].qt;
      const CastCounters& c = counters[i];
      if (!setting) {
        EXPECT_EQ(c.elements, 0U);
        continue;
      }
      const reference::Matrix& tensor = *tensors[i / 2];
      const auto matrix = i % 2 == 0 ? tensor : reference::transpose(tensor);
      const auto copy = reference::cast(matrix, over(setting->granularity), setting->dtype,
                                        setting->pow2, NonFinite::kSaturate);
      const reference::CastCounts expected = reference::count_cast(matrix, copy);
      EXPECT_EQ(c.elements, matrix.values.size());
      EXPECT_EQ(c.saturated, expected.saturated);
      EXPECT_EQ(c.flushed, expected.flushed);
      EXPECT_EQ(c.non_finite, expected.non_finite);
      const float amax = reference::amax(tensor, reference::AmaxOver::kTensor)[0];
      EXPECT_EQ(std::bit_cast<uint32_t>(c.amax), std::bit_cast<uint32_t>(amax));
      const bool tensor_scale = setting->granularity == Granularity::kTensor;
      EXPECT_EQ(c.scale, tensor_scale ? copy.scales[0] : 0.0F);
    }
    F8_ASSERT_OK(clear_counters(context(), device.as<CastCounters>(), counters.size(), nullptr));
    F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
    EXPECT_EQ(device.download<uint8_t>(), std::vector<uint8_t>(device.bytes()));
  }
}

// A graph of a cast, a forward and a backward: the weight is cast in the first replay alone, and
// again once it is invalidated.
TEST_P(LinearOptionsTest, AValidWeightIsNotCastAgainInAGraph) {
  for (const Shape shape : {kShapes[0], kShapes[1]}) {
    SCOPED_TRACE(f8::format("{} {}", GetParam(), to_string(shape)));
    const auto linear = plan(describe(GetParam(), shape));
    ASSERT_NE(linear, nullptr);
    Tensors t(context(), *linear, shape.m, 5);
    QuantizerDesc of_weight = weight_of(linear->desc());
    of_weight.noop_flag = true;
    const Fp8Weight weight(context_, of_weight);
    DeviceBuffer noop_flag(context(), std::vector<uint32_t>{0xdeadbeef});
    const DeviceStream stream(context());
    const auto micro_batch = [&]() -> Status {
      QuantizeCall cast = weight.call(t);
      cast.noop_flag = noop_flag.as<uint32_t>();
      F8_TRY(weight.Quantized::run(cast, stream.get()));
      ForwardCall forward = t.forward();
      forward.w.fp8 = &weight.w_tensor;
      F8_TRY(linear->forward(forward, stream.get()));
      BackwardCall backward = t.backward();
      backward.w.fp8 = &weight.w_tensor;
      return linear->backward(backward, stream.get());
    };
    const DeviceGraph graph(context(), stream, micro_batch);
    graph.replay();
    EXPECT_EQ(noop_flag.download<uint32_t>()[0], 1U);
    const auto cast = weight.tensor.download<uint8_t>();
    const Bits first = results(t);

    // The weight changes, and nobody says so: its copies stay.
    const reference::Matrix old = t.w;
    put(t.w, t.device_w, 3, 4, 1000);
    graph.replay();
    EXPECT_EQ(weight.tensor.download<uint8_t>(), cast);

    F8_ASSERT_OK(set_words(driver(), noop_flag.as<uint32_t>(), 0, 1, stream.get()));
    graph.replay();
    EXPECT_NE(weight.tensor.download<uint8_t>(), cast);

    t.w = old;
    put(t.w, t.device_w, 0, 0, old.values[0]);
    F8_ASSERT_OK(set_words(driver(), noop_flag.as<uint32_t>(), 0, 1, stream.get()));
    graph.replay();
    EXPECT_EQ(weight.tensor.download<uint8_t>(), cast);
    EXPECT_EQ(results(t), first);
    EXPECT_TRUE(weight.tensor.guards_are_whole() && noop_flag.guards_are_whole());
  }
}

TEST_P(LinearOptionsTest, OneFlagForTheWeightsOfAModel) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  QuantizerDesc of_weight = weight_of(linear->desc());
  of_weight.noop_flag = true;
  const auto quantizer = Quantizer::plan(context_, of_weight).value();
  constexpr size_t kLayers = 33;  // more than a launch takes
  const std::vector<std::shared_ptr<const Quantizer>> quantizers(kLayers, quantizer);
  const auto casts = QuantizerList::plan(context_, quantizers);
  F8_ASSERT_OK(casts);
  const DeviceBuffer workspace(context(), casts->workspace_bytes());
  const DeviceBuffer noop_flag(context(), std::vector<uint32_t>{0});
  Tensors t(context(), *linear, 300, 5);
  std::vector<std::unique_ptr<Quantized>> weights;
  std::vector<QuantizeCall> calls;
  for (size_t i = 0; i < kLayers; ++i) {
    weights.push_back(std::make_unique<Quantized>(context(), quantizer));
    calls.push_back(weights.back()->call(t.device_w, 208, t.slots));
    calls.back().step = nullptr;  // the list's
  }
  const auto run_all = [&] {
    return casts->run(listed(calls, workspace.as(), &kFirstOfSteps, noop_flag.as<uint32_t>()),
                      nullptr);
  };
  F8_ASSERT_OK(run_all());
  EXPECT_EQ(noop_flag.download<uint32_t>()[0], 1U);
  const auto first = weights.back()->tensor.download<uint8_t>();
  EXPECT_EQ(weights.front()->tensor.download<uint8_t>(), first);
  put(t.w, t.device_w, 3, 4, 1000);
  F8_ASSERT_OK(run_all());
  EXPECT_EQ(weights.back()->tensor.download<uint8_t>(), first);
  F8_ASSERT_OK(set_words(driver(), noop_flag.as<uint32_t>(), 0, 1, nullptr));
  F8_ASSERT_OK(run_all());
  EXPECT_NE(weights.back()->tensor.download<uint8_t>(), first);
}

}  // namespace
}  // namespace f8::runtime::gpu
