// The tests of casts of what is computed share a case, a source, and a fixture that compares them with plain casts on an
// emulated device.
#pragma once

#include <cstring>

#include "runtime/emulation/activations.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {

using reference::Matrix;
using testing::Buffer;
using testing::bytes;
using testing::FakeCuda;
using testing::Slots;

using kernels::Activation;

struct ComputedCase {
  std::string_view recipe;
  int64_t rows, cols, gap;
};

inline constexpr ComputedCase kComputedCases[] = {
    ComputedCase{"delayed", 1, 16, 0}, ComputedCase{"delayed", 130, 272, 8},
    ComputedCase{"delayed", 256, 128, 0}, ComputedCase{"blockwise", 1, 16, 8},
    ComputedCase{"blockwise", 127, 144, 0}, ComputedCase{"blockwise", 300, 400, 16},
    ComputedCase{"tensorwise", 1, 16, 8}, ComputedCase{"tensorwise", 300, 400, 0},
    ComputedCase{"rowwise", 1, 16, 0}, ComputedCase{"rowwise", 130, 272, 8},
    // More tiles than leave their maxima for the cast, and as many where a call
    // has all rows alone.
    ComputedCase{"rowwise", 2, 10'384, 0}, ComputedCase{"rowwise", 2, 10'112, 0},
    ComputedCase{"mixed", 130, 272, 8}, ComputedCase{"apart", 130, 272, 0}};

struct CastCaseSource {
  CastSource source;
  Activation activation = Activation::kSilu;
  bool bias = false;  // of a LayerNorm
  void set(QuantizerDesc& desc) const {
    desc.source = source;
    desc.activation = activation;
  }
  [[nodiscard]] std::string name() const {
    return f8::format("{} {} {}", name_of(source), static_cast<int>(activation), bias);
  }
  [[nodiscard]] bool is_norm() const {
    return source == CastSource::kRmsNorm || source == CastSource::kLayerNorm;
  }
};

// The recipe of a case: "mixed" has a tensor's scale for q and those of columns for qt, and "apart" makes
// such copies by kernels of their own.
inline Recipe recipe_of(std::string_view name) {
  if (name != "mixed" && name != "apart") return find_recipe(name).value();
  Recipe recipe = find_recipe("rowwise").value();
  recipe.name = name;
  for (const Gemm gemm : {Gemm::kOutput, Gemm::kGradInput}) {
    recipe.gemms[static_cast<size_t>(gemm)].a.granularity = Granularity::kTensor;
    recipe.gemms[static_cast<size_t>(gemm)].a.pow2 = name == "mixed";
  }
  return recipe;
}

// The words of delayed scaling of one operand.
inline const float8_step kOrdinaryStep = {};

class ComputedCastTest : public ::testing::TestWithParam<ComputedCase> {
 protected:
  static Matrix random(int64_t rows, int64_t cols, uint64_t seed, Dtype type) {
    return reference::rounded_to(
        reference::random_matrix(rows, cols, seed, reference::Distribution::kOutliers), type);
  }
  // The matrix that is cast, of x and a second operand: up, the norm's weight and bias [2][cols], or none.
  static Matrix computed(const CastCaseSource& of, const Matrix& x, const Matrix& other,
                         Dtype type) {
    Matrix h = x;
    for (int64_t r = 0; r < x.rows; ++r) {
      for (int64_t c = 0; c < x.cols; ++c) {
        const size_t i = static_cast<size_t>(r * x.cols + c);
        h.values[i] = of.is_norm() ? normalized(of, x.values[i], r, c, other)
                      : of.source == CastSource::kGlu
                          ? emulation::glu(of.activation, x.values[i], other.values[i], type)
                          : emulation::activated(of.activation, x.values[i], type).value;
      }
    }
    return reference::rounded_to(h, type);
  }
  static float normalized(const CastCaseSource& of, float x, int64_t row, int64_t col,
                          const Matrix& other) {
    const float weight = other.values[static_cast<size_t>(col)];
    if (of.source == CastSource::kRmsNorm) return x * rstd_of(row) * weight;
    const float centered = (x - mean_of(row)) * rstd_of(row);
    if (!of.bias) return centered * weight;
    return std::fma(centered, weight, other.values[static_cast<size_t>(other.cols + col)]);
  }
  static float mean_of(int64_t row) { return 0.37F * static_cast<float>(row % 5 - 2); }
  static float rstd_of(int64_t row) { return 1.0F / (0.3F + static_cast<float>(row % 7)); }
  static Matrix other(const CastCaseSource& of, int64_t rows, int64_t cols, Dtype type) {
    return random(of.source == CastSource::kGlu ? rows : 2, cols, 6, type);
  }
  // Sets the second operand of a call, which has half of its bytes in each row where it is of a norm.
  void set_other(const CastCaseSource& of, Buffer& from, int64_t ld, QuantizeCall& call) {
    if (of.source == CastSource::kGlu) call.up = {from.data(), ld};
    if (!of.is_norm()) return;
    rstd_.clear(), mean_.clear();
    for (int64_t r = 0; r < call.rows; ++r) {
      rstd_.push_back(rstd_of(r)), mean_.push_back(mean_of(r));
    }
    call.norm_weight = from.data();
    call.rstd = rstd_.data();
    if (of.source == CastSource::kLayerNorm) call.mean = mean_.data();
    if (of.bias) call.norm_bias = from.data() + from.bytes() / 2;
  }
  // A call has a launch for the maxima that its scales come from, and one for the copies.
  [[nodiscard]] size_t launches(const Quantizer& fused, const float8_step& step) const {
    const std::string& recipe = fused.desc().recipe.name;
    const bool known = recipe == "blockwise" || (recipe == "delayed" && step.first_step == 0);
    const bool twice = recipe == "apart" && fused.desc().qt;  // q and qt by kernels of their own
    return (known ? 1 : 2) << (twice ? 1 : 0);
  }
  void run(const Quantizer& quantizer, QuantizeCall call) {
    const bool first = call.step != nullptr && call.step->first_step != 0;
    Buffer workspace(std::max<size_t>(quantizer.workspace_bytes(first), 16));
    const Status done = quantizer.run(with_workspace(call, workspace.data()), nullptr);
    ASSERT_TRUE(done) << done.error().message;
    EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
    EXPECT_TRUE(workspace.guard_is_whole());
  }
  // The description of a gradient's cast. In one of two steps there may be more rows than the call has.
  [[nodiscard]] static QuantizerDesc of_gradient(Dtype type, bool first) {
    const auto& [recipe, rows, cols, gap] = GetParam();
    QuantizerDesc desc{.operand = Tensor::kGradOutput,
                       .rows = first ? rows : rows + 150,
                       .cols = cols,
                       .recipe = recipe_of(recipe)};
    desc.dtype = type;
    return desc;
  }
  // The copies that a plain cast makes of what was computed.
  std::vector<uint8_t> cast_of(const Quantizer& plain, const Matrix& computed,
                               const float8_step& step, Slots& slots) {
    const Dtype type = plain.desc().dtype;
    Buffer x(reference::rounded_to(computed, type), type), copies(plain.tensor_bytes());
    run(plain, {.rows = computed.rows,
                .x = {x.data()},
                .tensor = {copies.data()},
                .step = &step,
                .scales = slots});
    return bytes(copies);
  }
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
  std::vector<float> rstd_, mean_;
};

}  // namespace f8::runtime
