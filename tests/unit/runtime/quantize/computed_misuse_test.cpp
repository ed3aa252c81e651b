// Plans and calls of casts of computed values that cannot be: one error, and nothing is launched.
#include "runtime/lists/quantizer_list.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using kernels::Activation;
using testing::Buffer;
using testing::FakeCuda;
using testing::says;
using testing::Slots;

class ComputedMisuse : public ::testing::Test {
 protected:
  void refused(const QuantizerDesc& desc, ErrorCode code, std::string_view words) {
    const auto plan = Quantizer::plan(context_, desc);
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().code, code);
    EXPECT_TRUE(says(plan.error(), words)) << plan.error().message;
  }
  static QuantizerDesc desc(std::string_view recipe) {
    QuantizerDesc out{.rows = 32, .cols = 64, .recipe = find_recipe(recipe).value()};
    out.source = CastSource::kGlu;
    return out;
  }
  // Each change to a good call is refused in its words, and nothing is launched.
  using Cases = std::span<const std::tuple<std::function<void(QuantizeCall&)>, std::string_view>>;
  void refused_calls(const Quantizer& quantizer, const QuantizeCall& good, Cases cases,
                     Buffer& tensor) {
    for (const auto& [change, words] : cases) {
      QuantizeCall call = good;
      change(call);
      const Status status = quantizer.run(call, nullptr);
      ASSERT_FALSE(status) << words;
      EXPECT_TRUE(says(status.error(), words)) << status.error().message;
    }
    EXPECT_TRUE(tensor.untouched());
    EXPECT_TRUE(cuda_.launches.empty());
  }
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
};

TEST_F(ComputedMisuse, PlansThatCannotBe) {
  QuantizerDesc high = desc("rowwise_with_gw_hp");
  high.q = false;
  refused(high, ErrorCode::kUnsupported, "makes no fp8 copy");
  QuantizerDesc weight = desc("blockwise");
  weight.operand = Tensor::kWeight;
  refused(weight, ErrorCode::kInvalidArgument, "it is for FLOAT8_INPUT");
  for (const CastSource source : {CastSource::kGluBackward, CastSource::kActivationBackward}) {
    weight.source = source;
    refused(weight, ErrorCode::kInvalidArgument, "it is for FLOAT8_GRAD_OUTPUT");
  }
  QuantizerDesc merged = desc("blockwise");
  merged.source = CastSource::kMergedGluBackward;
  merged.cols = 256;
  refused(merged, ErrorCode::kInvalidArgument, "it is for FLOAT8_GRAD_OUTPUT");
  merged.operand = Tensor::kGradOutput;
  merged.over_ranks = true;
  refused(merged, ErrorCode::kUnsupported, "and over_ranks");
  merged.over_ranks = false;
  merged.cols = 128;
  refused(merged, ErrorCode::kUnsupported, "FLOAT8_MERGED_GLU_BACKWARD with cols 128");
  merged.source = CastSource::kMergedGluBackwardUpFirst;
  refused(merged, ErrorCode::kUnsupported, "FLOAT8_MERGED_GLU_BACKWARD_UP_FIRST with cols 128");
  QuantizerDesc sums = desc("blockwise");
  sums.column_sums = true;
  refused(sums, ErrorCode::kInvalidArgument, "it is for the gradients of activations");
  QuantizerDesc less = desc("tensorwise");
  less.less_workspace = true;
  refused(less, ErrorCode::kInvalidArgument, "it is for FLOAT8_GLU_BACKWARD");
  for (const CastSource source :
       {CastSource::kPlain, CastSource::kRmsNorm, CastSource::kLayerNorm}) {
    QuantizerDesc activated = desc("blockwise");
    activated.source = source;
    activated.activation = Activation::kGelu;
    refused(activated, ErrorCode::kInvalidArgument, "float8_quantizer_desc.activation");
  }
  QuantizerDesc rounded = desc("blockwise");
  rounded.f32_source = true;
  refused(rounded, ErrorCode::kInvalidArgument, "it is for FLOAT8_INPUT");
  QuantizerDesc ranked = desc("blockwise");
  ranked.over_ranks = true;
  ranked.whole_rows = 64;
  refused(ranked, ErrorCode::kInvalidArgument, "without whole_rows");
  ranked.whole_rows = 0;
  ranked.source = CastSource::kRmsNorm;
  refused(ranked, ErrorCode::kInvalidArgument, "without over_ranks");
  const std::shared_ptr<const Quantizer> all[] = {
      Quantizer::plan(context_, desc("blockwise")).value()};
  const auto list = QuantizerList::plan(context_, all);
  ASSERT_FALSE(list);
  EXPECT_TRUE(says(list.error(), "quantizers[0] has FLOAT8_GLU")) << list.error().message;
}

TEST_F(ComputedMisuse, CallsThatCannotBe) {
  const auto fused = Quantizer::plan(context_, desc("delayed")).value();
  QuantizerDesc of_plain = desc("blockwise");
  of_plain.source = CastSource::kPlain;
  const auto plain = Quantizer::plan(context_, of_plain).value();
  Buffer x(32 * 64 * 2), up(32 * 64 * 2), tensor(fused->tensor_bytes() + plain->tensor_bytes());
  Buffer workspace(plain->workspace_bytes() + 16);
  alignas(16) float scale[8] = {1, 0, 0, 0, 1};
  uint32_t amax[1] = {0}, format[1] = {0};
  QuantizeCall good{.rows = 32, .x = {x.data()}, .tensor = {tensor.data()}};
  good.scales = ScaleSlots{amax, scale, format};
  good.up.data = up.data();
  const auto refused = [&](const Quantizer& quantizer, const QuantizeCall& call,
                           std::string_view words) {
    const Status status = quantizer.run(with_workspace(call, workspace.data()), nullptr);
    ASSERT_FALSE(status);
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
  };
  QuantizeCall call = good;
  call.up.data = nullptr;
  refused(*fused, call, "float8_quantize_args.up.data is NULL");
  refused(*plain, good, "float8_quantize_args.up.data is given");
  call = good;
  call.up.data = tensor.data();
  refused(*fused, call, "overlap");
  call = good;
  call.up.ld = 60;
  refused(*fused, call, "up.ld");
  call = good;
  call.norm_weight = up.data();
  refused(*fused, call, "float8_quantize_args.norm_weight is given");
  call = good;
  call.norm_bias = up.data();
  refused(*fused, call, "float8_quantize_args.norm_bias is given");
  EXPECT_TRUE(tensor.untouched());
  EXPECT_TRUE(cuda_.launches.empty());
}

// A cast of qt reads what the cast of q left for it.
TEST_F(ComputedMisuse, ACastAgainNeedsTheMaximaOfColumns) {
  QuantizerDesc of_qt = desc("rowwise");
  of_qt.q = false;
  of_qt.recast = true;
  const auto quantizer = Quantizer::plan(context_, of_qt).value();
  Buffer gate(32 * 64 * 2), up(32 * 64 * 2), tensor(quantizer->tensor_bytes()), scratch(1024);
  const QuantizeCall good{.rows = 32,
                          .x = {gate.data()},
                          .up = {up.data()},
                          .tensor = {tensor.data()},
                          .workspace = {scratch.data()}};
  const float8_tensor without{.rows = 32, .cols = 64};
  const std::tuple<std::function<void(QuantizeCall&)>, std::string_view> cases[] = {
      {[](QuantizeCall&) {}, "x.fp8 has no qt_inverse_scale"},
      {[&](QuantizeCall& call) { call.x.fp8 = &without; }, "x.fp8 has no qt_inverse_scale"}};
  refused_calls(*quantizer, good, cases, tensor);
}

TEST_F(ComputedMisuse, CallsOfANormThatCannotBe) {
  QuantizerDesc of_norm = desc("blockwise");
  of_norm.source = CastSource::kRmsNorm;
  const auto fused = Quantizer::plan(context_, of_norm).value();
  Buffer x(32 * 64 * 2), weight(64 * 2), rstd(32 * 4), tensor(fused->tensor_bytes());
  const QuantizeCall good{.rows = 32,
                          .x = {x.data()},
                          .tensor = {tensor.data()},
                          .norm_weight = weight.data(),
                          .rstd = reinterpret_cast<const float*>(rstd.data())};
  const std::tuple<std::function<void(QuantizeCall&)>, std::string_view> cases[] = {
      {[](QuantizeCall& c) { c.norm_weight = nullptr; }, "norm_weight is NULL"},
      {[](QuantizeCall& c) { c.rstd = nullptr; }, "rstd is NULL"},
      {[](QuantizeCall& c) { c.up = c.x; }, "up.data is given"},
      {[](QuantizeCall& c) { c.mean = c.rstd; }, "mean is given"},
      {[](QuantizeCall& c) { c.norm_bias = c.norm_weight; }, "norm_bias is given"},
      {[](QuantizeCall& c) { c.rstd = static_cast<const float*>(c.tensor.data); }, "overlap"},
      {[](QuantizeCall& c) { c.norm_weight = static_cast<const char*>(c.norm_weight) + 2; },
       "norm_weight"},
  };
  refused_calls(*fused, good, cases, tensor);
}

TEST_F(ComputedMisuse, CallsOfALayerNormThatCannotBe) {
  QuantizerDesc of_norm = desc("blockwise");
  of_norm.source = CastSource::kLayerNorm;
  const auto fused = Quantizer::plan(context_, of_norm).value();
  Buffer x(32 * 64 * 2), weight(64 * 2), bias(64 * 2), rstd(32 * 4), mean(32 * 4);
  Buffer tensor(fused->tensor_bytes());
  const QuantizeCall good{.rows = 32,
                          .x = {x.data()},
                          .tensor = {tensor.data()},
                          .norm_weight = weight.data(),
                          .rstd = reinterpret_cast<const float*>(rstd.data()),
                          .mean = reinterpret_cast<const float*>(mean.data()),
                          .norm_bias = bias.data()};
  const std::tuple<std::function<void(QuantizeCall&)>, std::string_view> cases[] = {
      {[](QuantizeCall& c) { c.norm_weight = nullptr; }, "norm_weight is NULL"},
      {[](QuantizeCall& c) { c.rstd = nullptr; }, "rstd is NULL"},
      {[](QuantizeCall& c) { c.mean = nullptr; }, "mean is NULL"},
      {[](QuantizeCall& c) { c.grad = c.x; }, "grad.data is given"},
      {[](QuantizeCall& c) { c.mean = static_cast<const float*>(c.tensor.data); }, "overlap"},
      {[](QuantizeCall& c) { c.norm_bias = c.tensor.data; }, "overlap"},
      {[](QuantizeCall& c) { c.norm_bias = static_cast<const char*>(c.norm_bias) + 2; },
       "norm_bias"},
  };
  refused_calls(*fused, good, cases, tensor);
}

TEST_F(ComputedMisuse, CallsOfAnActivationThatCannotBe) {
  QuantizerDesc of_gradient = desc("blockwise");
  of_gradient.operand = Tensor::kGradOutput;
  of_gradient.source = CastSource::kActivationBackward;
  of_gradient.activation = Activation::kGelu;
  of_gradient.column_sums = true;
  const auto fused = Quantizer::plan(context_, of_gradient).value();
  Buffer x(32 * 64 * 2), grad(32 * 64 * 2), sums(64 * 4), tensor(fused->tensor_bytes());
  Buffer workspace(fused->workspace_bytes());
  const QuantizeCall good{.rows = 32,
                          .x = {x.data()},
                          .tensor = {tensor.data()},
                          .grad = {grad.data()},
                          .column_sums = reinterpret_cast<float*>(sums.data())};
  const std::tuple<std::function<void(QuantizeCall&)>, std::string_view> cases[] = {
      {[](QuantizeCall& c) { c.grad.data = nullptr; }, "grad.data is NULL"},
      {[](QuantizeCall& c) { c.up = c.x; }, "up.data is given"},
      {[](QuantizeCall& c) { c.up_tensor = c.tensor; }, "up_tensor.data is given"},
      {[](QuantizeCall& c) { c.column_sums = nullptr; }, "column_sums is NULL"},
      {[](QuantizeCall& c) { c.column_sums = static_cast<float*>(c.tensor.data); }, "overlap"},
      {[](QuantizeCall& c) { c.grad.data = c.tensor.data; }, "overlap"},
      {[](QuantizeCall& c) { c.x.data = c.tensor.data; }, "overlap"},
      {[](QuantizeCall& c) { c.grad.ld = 60; }, "grad.ld"},
  };
  for (const auto& [change, words] : cases) {
    QuantizeCall call = good;
    change(call);
    const Status status = fused->run(with_workspace(call, workspace.data()), nullptr);
    ASSERT_FALSE(status) << words;
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
  }
  EXPECT_TRUE(tensor.untouched() && sums.untouched());
  EXPECT_TRUE(cuda_.launches.empty());
}

TEST_F(ComputedMisuse, CallsOverRanksThatCannotBe) {
  QuantizerDesc of_gradients = desc("tensorwise");
  of_gradients.operand = Tensor::kGradOutput;
  of_gradients.source = CastSource::kGluBackward;
  of_gradients.over_ranks = true;
  const auto fused = Quantizer::plan(context_, of_gradients).value();
  Buffer x(32 * 64 * 2), up(32 * 64 * 2), grad(32 * 64 * 2);
  Buffer tensors[2] = {Buffer(fused->tensor_bytes()), Buffer(fused->tensor_bytes())};
  uint32_t amax[2] = {}, row_amax[2][32] = {};
  const QuantizeCall good{.rows = 32,
                          .x = {x.data()},
                          .up = {up.data()},
                          .tensor = {tensors[0].data()},
                          .amax = &amax[0],
                          .row_amax = row_amax[0],
                          .grad = {grad.data()},
                          .up_tensor = {tensors[1].data()},
                          .up_amax = &amax[1],
                          .up_row_amax = row_amax[1]};
  const std::tuple<std::function<void(QuantizeCall&)>, std::string_view> cases[] = {
      {[](QuantizeCall& c) { c.up_amax = nullptr; }, "float8_quantize_args.up_amax is NULL"},
      {[](QuantizeCall& c) { c.up_row_amax = nullptr; },
       "float8_quantize_args.up_row_amax is NULL"},
      {[](QuantizeCall& c) { c.grad.data = nullptr; }, "float8_quantize_args.grad.data is NULL"},
      {[](QuantizeCall& c) { c.up_amax = c.amax; }, "overlap"}};
  for (const auto& [change, words] : cases) {
    QuantizeCall call = good;
    change(call);
    for (const Status& status : {fused->find_amax(call, nullptr), fused->run(call, nullptr)}) {
      if (status && words == "overlap") continue;  // what is read alone may overlap
      ASSERT_FALSE(status) << words;
      EXPECT_TRUE(says(status.error(), words)) << status.error().message;
    }
    cuda_.launches.clear();
  }
}

TEST_F(ComputedMisuse, BackwardCallsThatCannotBe) {
  QuantizerDesc of_gradients = desc("delayed");
  of_gradients.operand = Tensor::kGradOutput;
  of_gradients.source = CastSource::kGluBackward;
  const auto fused = Quantizer::plan(context_, of_gradients).value();
  Buffer x(32 * 64 * 2), up(32 * 64 * 2), grad(32 * 64 * 2), workspace(fused->workspace_bytes());
  Buffer tensors[2] = {Buffer(fused->tensor_bytes()), Buffer(fused->tensor_bytes())};
  Slots slots[2];
  const QuantizeCall good{.rows = 32,
                          .x = {x.data()},
                          .up = {up.data()},
                          .tensor = {tensors[0].data()},
                          .scales = slots[0],
                          .grad = {grad.data()},
                          .up_tensor = {tensors[1].data()},
                          .up_scales = slots[1]};
  float8_step over_ranks = kFirstOfSteps;
  over_ranks.ranks = reinterpret_cast<float8_nccl_comm>(this);
  const std::tuple<std::function<void(QuantizeCall&)>, std::string_view> cases[] = {
      {[](QuantizeCall& c) { c.grad.data = nullptr; }, "float8_quantize_args.grad.data is NULL"},
      {[](QuantizeCall& c) { c.up.data = nullptr; }, "float8_quantize_args.up.data is NULL"},
      {[](QuantizeCall& c) { c.up_tensor.data = nullptr; },
       "float8_quantize_args.up_tensor.data is NULL"},
      {[](QuantizeCall& c) { c.up_transposed.data = c.up_tensor.data; },
       "float8_quantize_args.up_transposed.data is given and transposed.data is NULL"},
      {[](QuantizeCall& c) { c.up_scales = {}; }, "float8_quantize_args.up_scales is empty"},
      {[](QuantizeCall& c) { c.up_tensor = c.tensor; }, "overlap"},
      {[](QuantizeCall& c) { c.grad.data = c.up_tensor.data; }, "overlap"},
      {[](QuantizeCall& c) { c.grad.ld = 60; }, "grad.ld"},
      {[&](QuantizeCall& c) { c.step = &over_ranks; }, "quantize it with FLOAT8_PLAIN"},
      {[](QuantizeCall& c) { c.up_counters = static_cast<CastCounters*>(c.up_tensor.data); },
       "float8_quantize_args.up_counters is given"},
  };
  for (const auto& [change, words] : cases) {
    QuantizeCall call = good;
    change(call);
    const Status status = fused->run(with_workspace(call, workspace.data()), nullptr);
    ASSERT_FALSE(status) << words;
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
  }
  EXPECT_TRUE(tensors[0].untouched() && tensors[1].untouched());
  EXPECT_TRUE(cuda_.launches.empty());
}

}  // namespace
}  // namespace f8::runtime
