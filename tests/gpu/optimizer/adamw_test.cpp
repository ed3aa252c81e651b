// AdamW against the CPU reference: the update, and the maxima and fingerprints of what it leaves.
#include "runtime/optimizer/adamw.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <random>
#include <tuple>

#include "recipes/recipe.hpp"
#include "recipes/reference/adamw.hpp"
#include "recipes/reference/fingerprint.hpp"
#include "runtime/device/element_type.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

constexpr uint64_t kAdamwSeed = 0x0123456789abcdefU;
constexpr float kAdamwStep = 7;

struct AdamwShape {
  int64_t rows, cols;
  int32_t dtype, cast_dtype;
  bool row, col, amsgrad;
  bool whole = true;
};

// The tensors of a weight, on the host.
struct AdamwValues {
  std::vector<float> param, grad, exp_avg, exp_avg_sq, most;

  AdamwValues(size_t count, Dtype type, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, float scale, bool positive) {
      values.resize(count);
      for (float& value : values) {
        value = normal(random) * scale;
        if (positive) value = std::abs(value);
        value = round_element(value, type);
      }
    };
    fill(param, 0.02F, false);
    fill(grad, 0.5F, false);
    fill(exp_avg, 0.1F, false);
    fill(exp_avg_sq, 0.01F, true);
    fill(most, 0.01F, true);
  }
};

struct UpdatedWeight {
  UpdatedWeight(const Context& context, const AdamwShape& of, uint64_t seed)
      : shape(of),
        type(element_type(of.dtype)),
        count(static_cast<size_t>(of.rows * of.cols)),
        host(count, type, seed),
        param(context, bytes_of(host.param)),
        grad(context, bytes_of(host.grad)),
        exp_avg(context, bytes_of(host.exp_avg)),
        exp_avg_sq(context, bytes_of(host.exp_avg_sq)),
        most(context, bytes_of(host.most)),
        step(context, std::vector<float>{kAdamwStep}),
        amax(context, std::vector<uint32_t>(1)),
        row_amax(context, std::vector<uint32_t>(static_cast<size_t>(of.rows))),
        col_amax(context, std::vector<uint32_t>(static_cast<size_t>(of.cols))),
        fingerprint(context, std::vector<uint64_t>(FLOAT8_FINGERPRINT_BYTES / 8)) {}

  [[nodiscard]] std::vector<uint8_t> bytes_of(const std::vector<float>& values) const {
    std::vector<uint8_t> bytes(values.size() * size_bytes(type));
    for (size_t i = 0; i < values.size(); ++i) {
      store_element(bytes.data(), static_cast<int64_t>(i), values[i], type);
    }
    return bytes;
  }
  [[nodiscard]] AdamwWeight call() const {
    AdamwWeight w;
    w.param = param.as();
    w.grad = grad.as();
    w.exp_avg = exp_avg.as();
    w.exp_avg_sq = exp_avg_sq.as();
    if (shape.amsgrad) w.max_exp_avg_sq = most.as();
    w.step = step.as<float>();
    w.rows = shape.rows;
    w.cols = shape.cols;
    w.dtype = shape.dtype;
    w.cast_dtype = shape.cast_dtype;
    if (shape.whole) w.amax = amax.as<uint32_t>();
    if (shape.row) w.row_amax = row_amax.as<uint32_t>();
    if (shape.col) w.col_amax = col_amax.as<uint32_t>();
    w.fingerprint = fingerprint.as();
    w.seed = kAdamwSeed;
    return w;
  }
  // The same step on the host.
  void update(const reference::AdamwOptions& options) {
    const reference::Adamw adamw(options, kAdamwStep);
    for (size_t i = 0; i < count; ++i) {
      reference::AdamwElement e{host.param[i], host.grad[i], host.exp_avg[i], host.exp_avg_sq[i],
                                host.most[i]};
      adamw.update(e, shape.amsgrad);
      host.param[i] = round_element(e.param, type);
      host.grad[i] = round_element(e.grad, type);
      host.exp_avg[i] = round_element(e.exp_avg, type);
      host.exp_avg_sq[i] = round_element(e.exp_avg_sq, type);
      host.most[i] = round_element(e.max_exp_avg_sq, type);
    }
  }
  void expect(bool maxima = true) const {
    EXPECT_EQ(grad.download<uint8_t>(), bytes_of(host.grad));
    EXPECT_EQ(exp_avg.download<uint8_t>(), bytes_of(host.exp_avg));
    EXPECT_EQ(exp_avg_sq.download<uint8_t>(), bytes_of(host.exp_avg_sq));
    EXPECT_EQ(most.download<uint8_t>(), bytes_of(host.most));
    const auto found = param.download<uint8_t>();
    if (kEmulated) {
      EXPECT_EQ(found, bytes_of(host.param));
    }
    // powf of a device and that of the host may be some ulps apart, which the weight alone depends on.
    const float near = type == Dtype::kF32 ? 1e-6F : 1e-2F;
    for (size_t i = 0; i < count; ++i) {
      const float value = load_element(found.data(), static_cast<int64_t>(i), type);
      ASSERT_NEAR(value, host.param[i], near * std::abs(host.param[i]) + 1e-8F) << i;
    }
    if (maxima) expect_maxima(found);
    const auto words = fingerprint.download<uint64_t>();
    EXPECT_EQ((reference::Fingerprint{words[0], words[1]}),
              reference::fingerprint(found.data(), 1, found.size(), found.size(), kAdamwSeed));
    EXPECT_TRUE(std::ranges::all_of(words.begin() + 2, words.end(), [](auto w) { return w == 0; }));
    for (const DeviceBuffer* each :
         {&param, &grad, &exp_avg, &exp_avg_sq, &most, &amax, &row_amax, &col_amax, &fingerprint}) {
      EXPECT_TRUE(each->guards_are_whole());
    }
  }

  AdamwShape shape;
  Dtype type;
  size_t count;
  AdamwValues host;
  DeviceBuffer param, grad, exp_avg, exp_avg_sq, most, step, amax, row_amax, col_amax, fingerprint;

 private:
  void expect_maxima(const std::vector<uint8_t>& found) const {
    std::vector<uint32_t> tensor(1);
    std::vector<uint32_t> rows(static_cast<size_t>(shape.rows));
    std::vector<uint32_t> cols(static_cast<size_t>(shape.cols));
    for (size_t i = 0; i < count; ++i) {
      const float value = round_element(load_element(found.data(), static_cast<int64_t>(i), type),
                                        element_type(shape.cast_dtype));
      const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffffU;
      const auto raise = [&](uint32_t& word) { word = std::max(word, bits); };
      if (shape.whole) raise(tensor[0]);
      if (shape.row) raise(rows[i / cols.size()]);
      if (shape.col) raise(cols[i % cols.size()]);
    }
    EXPECT_EQ(amax.download<uint32_t>(), tensor);
    EXPECT_EQ(row_amax.download<uint32_t>(), rows);
    EXPECT_EQ(col_amax.download<uint32_t>(), cols);
  }
};

constexpr AdamwShape kAdamwShapes[] = {
    {1, 16, FLOAT8_F32, FLOAT8_F32, false, false, false},
    {48, 80, FLOAT8_F32, FLOAT8_BF16, false, false, false},
    {130, 144, FLOAT8_F32, FLOAT8_BF16, true, true, false},
    {64, 272, FLOAT8_F32, FLOAT8_F16, true, false, true},
    {256, 128, FLOAT8_F32, FLOAT8_F32, false, true, true},
    {129, 128, FLOAT8_BF16, FLOAT8_BF16, true, true, false},
    {96, 48, FLOAT8_BF16, FLOAT8_BF16, false, false, true},
    {32, 160, FLOAT8_F16, FLOAT8_F16, false, true, false},
    {130, 144, FLOAT8_F32, FLOAT8_BF16, true, true, true},
    {144, 64, FLOAT8_F32, FLOAT8_BF16, true, true, false, false},
    {32, 16, FLOAT8_BF16, FLOAT8_BF16, false, false, false, false},
};
constexpr reference::AdamwOptions kAdamwOptions{
    .lr = 1e-3F, .beta1 = 0.9F, .beta2 = 0.95F, .eps = 1e-8F, .weight_decay = 0.1F};

float8_adamw_args adamw_args(const reference::AdamwOptions& options) {
  float8_adamw_args args;
  args.lr = options.lr;
  args.beta1 = options.beta1;
  args.beta2 = options.beta2;
  args.eps = options.eps;
  args.weight_decay = options.weight_decay;
  args.maximize = options.maximize ? 1 : 0;
  return args;
}

class AdamwTest : public GpuTest {
 protected:
  void make(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      weights_.push_back(
          std::make_unique<UpdatedWeight>(context(), kAdamwShapes[i % std::size(kAdamwShapes)], i));
      calls_.push_back(weights_.back()->call());
    }
  }
  [[nodiscard]] Status step(const float8_adamw_args& args) const {
    return adamw(context(), args, {calls_.size(), calls_.data()}, {}, nullptr);
  }
  void expect(const reference::AdamwOptions& options) const {
    for (size_t i = 0; i < weights_.size(); ++i) {
      SCOPED_TRACE(i);
      weights_[i]->update(options);
      weights_[i]->expect();
    }
  }
  std::vector<std::unique_ptr<UpdatedWeight>> weights_;
  std::vector<AdamwWeight> calls_;
};

TEST_F(AdamwTest, UpdatesAndFindsMaxima) {
  make(std::size(kAdamwShapes));
  F8_ASSERT_OK(step(adamw_args(kAdamwOptions)));
  expect(kAdamwOptions);
}

TEST_F(AdamwTest, Lists) {  // more of a kind than a launch takes
  make(by_device<size_t>(45, 10) * std::size(kAdamwShapes));
  F8_ASSERT_OK(step(adamw_args(kAdamwOptions)));
  expect(kAdamwOptions);
}

TEST_F(AdamwTest, OptionsInDeviceMemory) {
  make(std::size(kAdamwShapes));
  const float scale = 1024;
  const DeviceBuffer lr(context(), std::vector<float>{0.01F});
  const DeviceBuffer grad_scale(context(), std::vector<float>{scale});
  const DeviceBuffer found_inf(context(), std::vector<float>{0});
  reference::AdamwOptions options = kAdamwOptions;
  options.maximize = true;
  options.weight_decay = 0;
  float8_adamw_args args = adamw_args(options);
  options.lr = 0.01F;
  options.grad_scale = &scale;
  args.lr_tensor = lr.as<float>();
  args.grad_scale = grad_scale.as<float>();
  args.found_inf = found_inf.as<float>();
  F8_ASSERT_OK(step(args));
  expect(options);
}

// The maxima are needed all the same.
TEST_F(AdamwTest, AStepThatIsLeftOutHasTheMaximaOfTheOldWeights) {
  make(std::size(kAdamwShapes));
  const DeviceBuffer found_inf(context(), std::vector<float>{1});
  float8_adamw_args args = adamw_args(kAdamwOptions);
  args.found_inf = found_inf.as<float>();
  F8_ASSERT_OK(step(args));
  for (const auto& weight : weights_) weight->expect();
}

// A quantizer of a weight, copies that adamw() casts into, and others.
struct CastOfWeight {
  CastOfWeight(const Context& context, std::shared_ptr<const Quantizer> of)
      : quantizer(std::move(of)),
        made(context, std::vector<uint8_t>(quantizer->tensor_bytes())),
        expected(context, std::vector<uint8_t>(quantizer->tensor_bytes())),
        workspace(context, std::max<size_t>(quantizer->workspace_bytes(), 16)) {}

  [[nodiscard]] QuantizeCall call(const UpdatedWeight& weight, const DeviceBuffer& to) const {
    QuantizeCall call;
    call.x.data = weight.param.as();
    call.rows = weight.shape.rows;
    call.tensor.data = to.as();
    call.workspace.data = workspace.as();
    return call;
  }

  std::shared_ptr<const Quantizer> quantizer;
  DeviceBuffer made, expected, workspace;
};

QuantizerDesc quantizer_of(const AdamwShape& shape, const char* recipe) {
  QuantizerDesc desc;
  desc.operand = Tensor::kWeight;
  desc.rows = shape.rows;
  desc.cols = shape.cols;
  desc.recipe = find_recipe(recipe).value();
  desc.dtype = element_type(shape.cast_dtype);
  desc.f32_source = shape.dtype != shape.cast_dtype;
  return desc;
}

TEST_F(AdamwTest, CastsWhatItLeavesInTheSameLaunch) {
  using Shape = std::tuple<int64_t, int64_t, int32_t, int32_t>;
  for (const Shape& shape : {Shape{112, 144, FLOAT8_F32, FLOAT8_BF16},
                             {256, 272, FLOAT8_F32, FLOAT8_F16},
                             {48, 128, FLOAT8_BF16, FLOAT8_BF16},
                             {64, 160, FLOAT8_F32, FLOAT8_BF16},
                             {128, 128, FLOAT8_F32, FLOAT8_BF16},
                             {144, 144, FLOAT8_F32, FLOAT8_BF16},
                             {16, 144, FLOAT8_F32, FLOAT8_BF16}}) {
    const auto& [rows, cols, dtype, cast_dtype] = shape;
    weights_.push_back(std::make_unique<UpdatedWeight>(
        context(), AdamwShape{rows, cols, dtype, cast_dtype, false, false, false},
        static_cast<uint64_t>(rows)));
    calls_.push_back(weights_.back()->call());
    calls_.back().amax = nullptr;
  }
  std::vector<std::unique_ptr<CastOfWeight>> casts;
  std::vector<AdamwCast> calls;
  for (const auto& weight : weights_) {
    const auto quantizer = Quantizer::plan(context_, quantizer_of(weight->shape, "blockwise"));
    F8_ASSERT_OK(quantizer);
    casts.push_back(std::make_unique<CastOfWeight>(context(), *quantizer));
    const CastOfWeight& cast = *casts.back();
    calls.push_back({cast.quantizer.get(), cast.call(*weight, cast.made)});
  }
  const AdamwWeights all{calls_.size(), calls_.data()};
  F8_ASSERT_OK(adamw(context(), adamw_args(kAdamwOptions), all, calls, nullptr));
  for (size_t i = 0; i < weights_.size(); ++i) {
    SCOPED_TRACE(i);
    UpdatedWeight& weight = *weights_[i];
    weight.update(kAdamwOptions);
    weight.expect(false);
    const CastOfWeight& cast = *casts[i];
    F8_ASSERT_OK(cast.quantizer->run(cast.call(weight, cast.expected), nullptr));
    EXPECT_EQ(cast.made.download<uint8_t>(), cast.expected.download<uint8_t>());
    EXPECT_TRUE(cast.made.guards_are_whole());
  }
  const auto refused = [&](auto change, std::string_view words) {
    std::vector<AdamwWeight> tensors = calls_;
    std::vector<AdamwCast> bad = calls;
    change(tensors.front(), bad.front());
    const Status status =
        adamw(context(), adamw_args(kAdamwOptions), {tensors.size(), tensors.data()}, bad, nullptr);
    ASSERT_FALSE(status) << words;
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
  };
  const auto tensorwise =
      Quantizer::plan(context_, quantizer_of(weights_.front()->shape, "tensorwise"));
  F8_ASSERT_OK(tensorwise);
  refused([](AdamwWeight&, AdamwCast& c) { c.call.tensor.data = nullptr; }, "tensor.data is NULL");
  refused([&](AdamwWeight& w, AdamwCast&) { w.amax = weights_.front()->amax.as<uint32_t>(); },
          "words for maxima");
  refused([](AdamwWeight& w, AdamwCast&) { w.cast_dtype = FLOAT8_F32; },
          "cols, dtype and cast_dtype");
  refused([&](AdamwWeight&, AdamwCast& c) { c.quantizer = tensorwise->get(); },
          "call float8_quantize behind");
}

// The scale is on the device already, and the amax is recorded.
TEST_F(AdamwTest, CastsWithADelayedScale) {
  UpdatedWeight weight(context(), {48, 144, FLOAT8_F32, FLOAT8_BF16, false, false, true}, 3);
  const auto quantizer = Quantizer::plan(context_, quantizer_of(weight.shape, "delayed"));
  F8_ASSERT_OK(quantizer);
  const CastOfWeight cast(context(), *quantizer);
  constexpr size_t kSlots = 8;  // of a linear, and more
  std::vector<float> scales(kSlots * kernels::kScaleStride, 256.0F);
  for (size_t i = 0; i < kSlots; ++i) {
    scales[i * kernels::kScaleStride + kernels::kInverse] = 1.0F / 256.0F;
  }
  const DeviceBuffer scale(context(), scales);
  const DeviceBuffer of_update(context(), std::vector<uint32_t>(kSlots));
  const DeviceBuffer of_cast(context(), std::vector<uint32_t>(kSlots));
  const auto call = [&](const DeviceBuffer& to, const DeviceBuffer& amax) {
    QuantizeCall made = cast.call(weight, to);
    made.scales.opaque[0] = amax.as();
    made.scales.opaque[1] = scale.as();
    return made;
  };
  AdamwWeight w = weight.call();
  w.amax = nullptr;
  AdamwCast with{cast.quantizer.get(), call(cast.made, of_update)};
  F8_ASSERT_OK(adamw(context(), adamw_args(kAdamwOptions), {1, &w}, {&with, 1}, nullptr));
  weight.update(kAdamwOptions);
  weight.expect(false);
  F8_ASSERT_OK(cast.quantizer->run(call(cast.expected, of_cast), nullptr));
  EXPECT_EQ(cast.made.download<uint8_t>(), cast.expected.download<uint8_t>());
  EXPECT_EQ(of_update.download<uint32_t>(), of_cast.download<uint32_t>());
  const auto recorded = of_cast.download<uint32_t>();
  EXPECT_TRUE(std::ranges::any_of(recorded, [](uint32_t word) { return word > 0; }));
}

TEST_F(AdamwTest, RefusesBadInput) {
  make(2);
  const auto refused = [&](auto change, std::string_view words) {
    std::vector<AdamwWeight> calls = calls_;
    float8_adamw_args args = adamw_args(kAdamwOptions);
    change(args, calls);
    const Status status = adamw(context(), args, {calls.size(), calls.data()}, {}, nullptr);
    ASSERT_FALSE(status) << words;
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
  };
  using Calls = std::vector<AdamwWeight>;
  refused([](auto& args, Calls&) { args.lr = -1; }, "float8_adamw_args.lr is -1");
  refused([](auto& args, Calls&) { args.eps = std::nan(""); }, "float8_adamw_args.eps is nan");
  refused([](auto& args, Calls&) { args.beta2 = 1; }, "float8_adamw_args.beta2 is 1");
  refused([](auto&, Calls& c) { c[1].param = nullptr; },
          "float8_adamw_args.tensors[1]: float8_adamw_tensor.param is NULL");
  refused([](auto&, Calls& c) { c[0].step = nullptr; }, "tensors[0]: float8_adamw_tensor.step");
  refused([](auto&, Calls& c) { c[1].cols = 24; }, "cols is 24; it is a multiple of 16");
  refused([](auto&, Calls& c) { c[1].dtype = FLOAT8_F16; }, "FLOAT8_F32 alone is rounded");
  refused([](auto&, Calls& c) { c[1].exp_avg = c[1].exp_avg_sq; }, "overlap");
  refused([](auto&, Calls& c) { c[1].grad = static_cast<uint8_t*>(c[1].grad) + 4; }, "16 bytes");
  refused([](auto&, Calls& c) { c[0].param = c[1].param; },
          "param is that of tensors[0]; a step updates each weight once");
  for (const auto& weight : weights_) {  // nothing was launched
    EXPECT_EQ(weight->param.download<uint8_t>(), weight->bytes_of(weight->host.param));
    EXPECT_EQ(weight->amax.download<uint32_t>()[0], 0U);
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
