// The casts of activations, of gated ones, of their gradients and of what a norm makes of x, on a device:
// every byte is that of the emulated device, whose arithmetic has the same bits by construction
// (codegen/kernels/cast/activations.cuh, norm.cuh).
#include <algorithm>
#include <cmath>
#include <random>

#include "runtime/linear/tensors/quantizer.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

struct ComputedCase {
  const char* recipe;
  int64_t rows, cols, gap;  // gap: elements between rows
};

class ComputedCastTest : public GpuTestWith<ComputedCase> {};
INSTANTIATE_TEST_SUITE_P(
    Shapes, ComputedCastTest,
    ::testing::Values(ComputedCase{"delayed", 1, 16, 0}, ComputedCase{"delayed", 130, 272, 8},
                      ComputedCase{"delayed", 1024, 512, 0}, ComputedCase{"blockwise", 1, 16, 8},
                      ComputedCase{"blockwise", 127, 144, 0},
                      ComputedCase{"blockwise", 513, 400, 16}, ComputedCase{"tensorwise", 1, 16, 0},
                      ComputedCase{"tensorwise", 513, 400, 8},
                      ComputedCase{"tensorwise", 1024, 4096, 0}, ComputedCase{"rowwise", 1, 16, 8},
                      ComputedCase{"rowwise", 130, 272, 0}, ComputedCase{"rowwise", 513, 400, 16},
                      // More tiles than leave their maxima for the cast.
                      ComputedCase{"rowwise", 130, 10'384, 0}));

// Elements of every size, with zeros and, if asked for, infinities and NaN among them.
std::vector<uint8_t> elements(int64_t rows, int64_t ld, Dtype type, unsigned seed, bool special) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 12);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * ld) * size_bytes(type));
  for (int64_t i = 0; i < rows * ld; ++i) {
    float value = normal(generator);
    switch (generator() % 997) {
      case 0:
        value *= special ? 1e6F : 10.0F;  // infinite in f16
        break;
      case 1:
        value *= 1e-6F;
        break;
      case 2:
        value = 0;
        break;
    }
    store_element(bytes.data(), i, value, type);
  }
  constexpr float kSpecial[] = {INFINITY, -INFINITY, NAN, -0.0F};
  if (special && rows > 1) {
    for (size_t i = 0; i < 4; ++i) {
      store_element(bytes.data(), static_cast<int64_t>(i) * 3 + seed % 2, kSpecial[i], type);
    }
  }
  return bytes;
}

// What a call leaves: the tensor and its amax, and of backward up's gradient likewise.
struct Left {
  std::vector<std::vector<uint8_t>> tensors;
  std::vector<uint32_t> amaxes;
  bool operator==(const Left&) const = default;
};
void PrintTo(const Left& left, std::ostream* to) {
  *to << left.tensors.size() << " tensors, amax " << left.amaxes.front();
}

// Casts on a device, with rows `ld` elements apart; a LayerNorm has a bias where that is said.
Left cast(const std::shared_ptr<Context>& context, const QuantizerDesc& desc, int64_t ld,
          const float8_step& step, bool bias) {
  const std::shared_ptr<const Quantizer> quantizer = Quantizer::plan(context, desc).value();
  const bool backward = desc.source == CastSource::kGluBackward;
  // Scales that propagate a NaN have bits that devices choose.
  const bool special = desc.non_finite == NonFinite::kSaturate;
  const auto matrix = [&](unsigned seed) {
    return DeviceBuffer(*context, elements(desc.rows, ld, desc.dtype, seed, special));
  };
  const DeviceBuffer gate = matrix(1), up = matrix(2), grad = matrix(3);
  std::vector<float> words(24);
  for (size_t i = 0; i < words.size(); i += 8) words[i] = 0.02F, words[i + 4] = 50.0F;
  const DeviceBuffer scale(*context, words);
  const DeviceBuffer amax[2] = {DeviceBuffer(*context, std::vector<uint32_t>(4)),
                                DeviceBuffer(*context, std::vector<uint32_t>(4))};
  const DeviceBuffer tensor[2] = {DeviceBuffer(*context, quantizer->tensor_bytes()),
                                  DeviceBuffer(*context, quantizer->tensor_bytes())};
  const size_t workspace_bytes = quantizer->workspace_bytes(step.first_step != 0);
  const DeviceBuffer workspace(*context, std::max<size_t>(workspace_bytes, 16));
  QuantizeCall call{.rows = desc.rows, .x = {gate.as(), ld}, .tensor = {tensor[0].as()}};
  call.step = &step;
  std::vector<float> factors(static_cast<size_t>(desc.rows));
  for (size_t r = 0; r < factors.size(); ++r)
    factors[r] = 1.0F / (0.3F + static_cast<float>(r % 7));
  const DeviceBuffer rstd(*context, factors);
  for (float& factor : factors) factor = 3.0F - 2.0F * factor;
  const DeviceBuffer mean(*context, factors);
  if (desc.source == CastSource::kRmsNorm || desc.source == CastSource::kLayerNorm) {
    call.norm_weight = up.as();
    call.rstd = rstd.as<float>();
    if (desc.source == CastSource::kLayerNorm) call.mean = mean.as<float>();
    if (bias) call.norm_bias = grad.as();
  } else if (desc.source == CastSource::kGlu || backward) {
    call.up = {up.as(), ld};
  }
  // Sums of a NaN have bits that devices choose, and so have those of both infinities.
  const DeviceBuffer sums(*context,
                          (backward ? 2 : 1) * static_cast<size_t>(desc.cols) * sizeof(float));
  if (desc.column_sums) call.column_sums = sums.as<float>();
  call.scales = ScaleSlots{amax[0].as<uint32_t>(), scale.as<float>(), nullptr};
  if (workspace_bytes > 0) call.workspace.data = workspace.as();
  if (desc.operand == Tensor::kGradOutput) call.grad = {grad.as(), ld};
  if (backward) {
    call.up_tensor.data = tensor[1].as();
    call.up_scales = ScaleSlots{amax[1].as<uint32_t>(), scale.as<float>(), nullptr};
  }
  // The words of a quantizer over ranks, of which there is one.
  const auto words_of = [&](int64_t count) {
    return DeviceBuffer(*context, std::vector<uint32_t>(static_cast<size_t>(count) + 1));
  };
  const DeviceBuffer maxima[2] = {words_of(quantizer->amax_words()),
                                  words_of(quantizer->amax_words())};
  const DeviceBuffer of_rows[2] = {words_of(quantizer->row_amax_words()),
                                   words_of(quantizer->row_amax_words())};
  if (quantizer->amax_words() > 0) call.amax = maxima[0].as<uint32_t>();
  if (quantizer->row_amax_words() > 0) call.row_amax = of_rows[0].as<uint32_t>();
  if (call.amax != nullptr && backward) call.up_amax = maxima[1].as<uint32_t>();
  if (call.row_amax != nullptr && backward) call.up_row_amax = of_rows[1].as<uint32_t>();
  const Status found = desc.over_ranks ? quantizer->find_amax(call, nullptr) : Status();
  EXPECT_TRUE(found) << found.error().message;
  const Status status = quantizer->run(call, nullptr);
  EXPECT_TRUE(status) << status.error().message;
  Left left;
  for (size_t i = 0; i < (backward ? 2U : 1U); ++i) {
    left.tensors.push_back(tensor[i].download<uint8_t>());
    // A device chooses the other bits of an amax that is NaN.
    for (const uint32_t word : amax[i].download<uint32_t>()) {
      left.amaxes.push_back(std::min(word, 0x7F800001U));
    }
    EXPECT_TRUE(tensor[i].guards_are_whole() && amax[i].guards_are_whole());
  }
  if (desc.column_sums && !special) left.tensors.push_back(sums.download<uint8_t>());
  EXPECT_TRUE(sums.guards_are_whole());
  return left;
}

TEST_P(ComputedCastTest, HasTheBitsOfTheEmulatedDevice) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  ContextOptions options;
  options.emulate = true;
  const auto emulated = Context::create(0, options);
  F8_ASSERT_OK(emulated);
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const NonFinite policy : {NonFinite::kPropagate, NonFinite::kSaturate}) {
      SCOPED_TRACE(f8::format("{} {}", to_string(type), static_cast<int>(policy)));
      QuantizerDesc desc{.rows = rows, .cols = cols, .recipe = find_recipe(recipe).value()};
      desc.dtype = type;
      desc.non_finite = policy;
      using enum CastSource;
      using enum kernels::Activation;
      for (const auto& [source, activation] : {std::pair{kGlu, kSilu},
                                               {kGlu, kGelu},
                                               {kGlu, kGeluTanh},
                                               {kGluBackward, kSilu},
                                               {kGluBackward, kGelu},
                                               {kGluBackward, kGeluTanh},
                                               {kMergedGluBackward, kSilu},
                                               {kMergedGluBackward, kGelu},
                                               {kMergedGluBackwardUpFirst, kSilu},
                                               {kMergedGluBackwardUpFirst, kGelu},
                                               {kRmsNorm, kSilu},
                                               {kLayerNorm, kSilu},
                                               {kActivation, kGelu},
                                               {kActivation, kGeluTanh},
                                               {kActivation, kRelu2},
                                               {kActivationBackward, kGelu},
                                               {kActivationBackward, kGeluTanh},
                                               {kActivationBackward, kRelu2}}) {
        const bool merged = is_merged(source);
        const bool gradient = merged || source == kGluBackward || source == kActivationBackward;
        desc.cols = merged ? (cols + 127) / 128 * 256 : cols;  // two halves of whole tiles
        desc.source = source;
        desc.activation = activation;
        desc.column_sums = (source == kActivationBackward && activation != kGelu) ||
                           (merged && activation == kGelu) ||
                           (source == kGluBackward && activation == kGeluTanh);
        desc.less_workspace = source == kGluBackward && activation == kGelu;
        desc.operand = gradient ? Tensor::kGradOutput : Tensor::kInput;
        for (const int first : {0, 1, 2}) {
          // The last time it is a quantizer over ranks, which norms, delayed scales and cut blocks have none of.
          desc.over_ranks = first == 2;
          if (first == 2 && !Quantizer::plan(*emulated, desc)) continue;
          const float8_step step{.first_step = first % 2};
          const bool bias = source == kLayerNorm && first == 1;
          EXPECT_EQ(cast(context_, desc, desc.cols + gap, step, bias),
                    cast(*emulated, desc, desc.cols + gap, step, bias))
              << name_of(source) << static_cast<int>(activation) << first;
        }
      }
    }
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
