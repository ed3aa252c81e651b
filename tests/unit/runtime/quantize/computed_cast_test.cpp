// The casts of activations, of gated ones, of their gradients and of what a norm makes of x, on an emulated
// device: the bits of casts of these, which are close to fp64.
#include <cstring>

#include "runtime/emulation/activations.hpp"
#include "runtime/lists/quantizer_list.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using reference::Matrix;
using testing::Buffer;
using testing::bytes;
using testing::FakeCuda;
using testing::Slots;

using kernels::Activation;

struct Case {
  std::string_view recipe;
  int64_t rows, cols, gap;
};

struct Source {
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

class ComputedCastTest : public ::testing::TestWithParam<Case> {
 protected:
  static Matrix random(int64_t rows, int64_t cols, uint64_t seed, Dtype type) {
    return reference::rounded_to(
        reference::random_matrix(rows, cols, seed, reference::Distribution::kOutliers), type);
  }
  // What is cast of x, by a second operand: up, the norm's weight and bias [2][cols], or none.
  static Matrix computed(const Source& of, const Matrix& x, const Matrix& other, Dtype type) {
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
  static float normalized(const Source& of, float x, int64_t row, int64_t col,
                          const Matrix& other) {
    const float weight = other.values[static_cast<size_t>(col)];
    if (of.source == CastSource::kRmsNorm) return x * rstd_of(row) * weight;
    const float centered = (x - mean_of(row)) * rstd_of(row);
    if (!of.bias) return centered * weight;
    return std::fma(centered, weight, other.values[static_cast<size_t>(other.cols + col)]);
  }
  static float mean_of(int64_t row) { return 0.37F * static_cast<float>(row % 5 - 2); }
  static float rstd_of(int64_t row) { return 1.0F / (0.3F + static_cast<float>(row % 7)); }
  static Matrix other(const Source& of, int64_t rows, int64_t cols, Dtype type) {
    return random(of.source == CastSource::kGlu ? rows : 2, cols, 6, type);
  }
  // Sets the second operand of a call, which has half of its bytes in each row where it is of a norm.
  void set_other(const Source& of, Buffer& from, int64_t ld, QuantizeCall& call) {
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
    Buffer workspace(std::max<size_t>(quantizer.workspace_bytes(), 16));
    const Status done = quantizer.run(with_workspace(call, workspace.data()), nullptr);
    ASSERT_TRUE(done) << done.error().message;
    EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
    EXPECT_TRUE(workspace.guard_is_whole());
  }
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
  std::vector<float> rstd_, mean_;
};
constexpr Source kOfInputs[] = {{CastSource::kGlu},
                                {CastSource::kGlu, Activation::kGeluTanh},
                                {CastSource::kRmsNorm},
                                {CastSource::kLayerNorm},
                                {CastSource::kLayerNorm, Activation::kSilu, true},
                                {CastSource::kActivation, Activation::kGelu},
                                {CastSource::kActivation, Activation::kGeluTanh},
                                {CastSource::kActivation, Activation::kRelu2}};
INSTANTIATE_TEST_SUITE_P(
    Shapes, ComputedCastTest,
    ::testing::Values(Case{"delayed", 1, 16, 0}, Case{"delayed", 130, 272, 8},
                      Case{"delayed", 256, 128, 0}, Case{"blockwise", 1, 16, 8},
                      Case{"blockwise", 127, 144, 0}, Case{"blockwise", 300, 400, 16},
                      Case{"tensorwise", 1, 16, 8}, Case{"tensorwise", 300, 400, 0},
                      Case{"rowwise", 1, 16, 0}, Case{"rowwise", 130, 272, 8},
                      // More tiles than leave their maxima for the cast, and as many where a call
                      // has all rows alone.
                      Case{"rowwise", 2, 10'384, 0}, Case{"rowwise", 2, 10'112, 0},
                      Case{"mixed", 130, 272, 8}, Case{"apart", 130, 272, 0}));

// The recipe of a case: "mixed" has a tensor's scale for q and those of columns for qt, and "apart" makes
// such copies by kernels of their own.
Recipe recipe_of(std::string_view name) {
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
const float8_step kOrdinaryStep = {};

// For each type, with both copies and q alone, in a first step and later; what delayed scaling records is
// the product's amax.
TEST_P(ComputedCastTest, IsTheCastOfTheProduct) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const Source& source : kOfInputs) {
    cuda_.launches.clear();
    for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      const Matrix x = random(rows, cols, 5, type), by = other(source, rows, cols, type);
      Buffer of_x(x, type, gap), of_by(by, type, gap), of_h(computed(source, x, by, type), type, 0);
      for (const int kind : {0, 1, 2, 3}) {
        SCOPED_TRACE(f8::format("{} {} {}", to_string(type), source.name(), kind));
        // In one of two steps there may be more rows than the call has.
        const int64_t rows_max = (kind & 2) != 0 ? rows : rows + 150;
        QuantizerDesc desc{.rows = rows_max, .cols = cols, .recipe = recipe_of(recipe)};
        desc.dtype = type;
        desc.qt = (kind & 1) != 0;
        const float8_step& step = (kind & 2) != 0 ? kFirstOfSteps : kOrdinaryStep;
        const auto plain = Quantizer::plan(context_, desc).value();
        source.set(desc);
        const auto fused = Quantizer::plan(context_, desc).value();
        ASSERT_EQ(fused->tensor_bytes(), plain->tensor_bytes());
        EXPECT_EQ(fused->workspace_bytes() > 0, recipe != "blockwise");

        Buffer expected(plain->tensor_bytes()), got(plain->tensor_bytes());
        Slots plain_slots, fused_slots;
        const int64_t ld = gap == 0 ? 0 : cols + gap;
        run(*plain, {.rows = rows,
                     .x = {of_h.data()},
                     .tensor = {expected.data()},
                     .step = &step,
                     .scales = plain_slots});
        const size_t before = cuda_.launches.size();
        QuantizeCall call{.rows = rows,
                          .x = {of_x.data(), ld},
                          .tensor = {got.data()},
                          .step = &step,
                          .scales = fused_slots};
        set_other(source, of_by, ld, call);
        run(*fused, call);
        EXPECT_EQ(cuda_.launches.size() - before, launches(*fused, step));
        EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.bytes()), 0);
        EXPECT_EQ(plain_slots.most(), fused_slots.most());
        EXPECT_EQ(fused_slots.most() > 0, recipe == "delayed");
        EXPECT_TRUE(got.guard_is_whole());
      }
    }
  }
}

// Infinities, NaN and zeros of either sign, which a LayerNorm without a bias keeps.
TEST_P(ComputedCastTest, IsTheCastOfALayerNormOfSpecialValues) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  constexpr float kSpecial[] = {INFINITY, -INFINITY, NAN, -0.0F, 0.0F};
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const int kind : {0, 1, 2, 3}) {
      SCOPED_TRACE(f8::format("{} {}", to_string(type), kind));
      const Source source{CastSource::kLayerNorm, Activation::kSilu, (kind & 1) != 0};
      QuantizerDesc desc{.rows = rows, .cols = cols, .recipe = recipe_of(recipe)};
      desc.dtype = type;
      desc.non_finite = (kind & 2) != 0 ? NonFinite::kSaturate : NonFinite::kPropagate;
      const auto plain = Quantizer::plan(context_, desc).value();
      source.set(desc);
      const auto fused = Quantizer::plan(context_, desc).value();
      Matrix x = random(rows, cols, 5, type), by = other(source, rows, cols, type);
      for (size_t i = 0; i < 5; ++i) {
        x.values[i] = by.values[5 + i] = kSpecial[i];
        by.values[static_cast<size_t>(cols) + 10 + i] = kSpecial[i];
      }
      Buffer of_x(x, type), of_by(by, type), of_h(computed(source, x, by, type), type);
      Buffer expected(plain->tensor_bytes()), got(plain->tensor_bytes());
      Slots plain_slots, fused_slots;
      run(*plain,
          {.rows = rows, .x = {of_h.data()}, .tensor = {expected.data()}, .scales = plain_slots});
      QuantizeCall call{
          .rows = rows, .x = {of_x.data()}, .tensor = {got.data()}, .scales = fused_slots};
      set_other(source, of_by, 0, call);
      run(*fused, call);
      EXPECT_EQ(bytes(got), bytes(expected));
      EXPECT_EQ(plain_slots.most(), fused_slots.most());
    }
  }
}

// q in one call and qt, made again by the scale that it left, in another.
TEST_P(ComputedCastTest, IsCastAgain) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const Source& of : kOfInputs) {
    const Matrix x = random(rows, cols, 5, Dtype::kBf16), by = other(of, rows, cols, Dtype::kBf16);
    Buffer of_x(x), of_by(by), of_h(computed(of, x, by, Dtype::kBf16));
    std::vector<std::vector<uint8_t>> made;
    for (const Source& source : {Source{CastSource::kPlain}, of}) {
      QuantizerDesc desc{.rows = rows, .cols = cols, .recipe = recipe_of(recipe)};
      source.set(desc);
      desc.qt = false;
      desc.scale_apart = true;
      const auto first = Quantizer::plan(context_, desc).value();
      std::swap(desc.q, desc.qt);
      desc.scale_apart = false;
      desc.recast = true;
      const auto again = Quantizer::plan(context_, desc).value();
      const bool plain = source.source == CastSource::kPlain;
      Buffer q(first->tensor_bytes()), kept(first->transposed_bytes() + 16);
      Buffer qt(again->tensor_bytes());
      Slots slots;
      QuantizeCall call{.rows = rows,
                        .x = {plain ? of_h.data() : of_x.data()},
                        .tensor = {q.data()},
                        .transposed = {kept.data()},
                        .step = &kFirstOfSteps,
                        .scales = slots};
      if (!plain) set_other(of, of_by, 0, call);
      run(*first, call);
      const float8_tensor view = first->view(q.data(), kept.data(), rows).value();
      call.x.fp8 = &view;
      call.tensor = {qt.data()};
      call.transposed = {};
      run(*again, call);
      for (Buffer* buffer : {&q, &kept, &qt}) made.push_back(bytes(*buffer));
    }
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(made[i], made[i + 3]) << of.name() << i;
  }
}

TEST_P(ComputedCastTest, IsTheCastOfTheGradients) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const auto& [type, activation] : {std::pair{Dtype::kBf16, Activation::kSilu},
                                         {Dtype::kF16, Activation::kSilu},
                                         {Dtype::kF32, Activation::kSilu},
                                         {Dtype::kBf16, Activation::kGeluTanh}}) {
    for (const bool first : {false, true}) {
      SCOPED_TRACE(f8::format("{} {}", to_string(type), first));
      QuantizerDesc desc{.operand = Tensor::kGradOutput,
                         .rows = first ? rows : rows + 150,
                         .cols = cols,
                         .recipe = recipe_of(recipe)};
      desc.dtype = type;
      const float8_step& step = first ? kFirstOfSteps : kOrdinaryStep;
      const auto plain = Quantizer::plan(context_, desc).value();
      Source{CastSource::kGluBackward, activation}.set(desc);
      const auto fused = Quantizer::plan(context_, desc).value();
      EXPECT_EQ(fused->workspace_bytes() > 0, recipe != "blockwise");

      const Matrix gate = random(rows, cols, 5, type), up = random(rows, cols, 6, type);
      const Matrix grad = random(rows, cols, 7, type);
      Matrix of[2] = {gate, up};
      for (size_t i = 0; i < gate.values.size(); ++i) {
        const auto both =
            emulation::glu_backward(activation, gate.values[i], up.values[i], grad.values[i], type);
        of[0].values[i] = both.gate;
        of[1].values[i] = both.up;
      }
      Buffer gate_in(gate, type, gap), up_in(up, type, gap), grad_in(grad, type, gap);
      Buffer got[2] = {Buffer(plain->tensor_bytes()), Buffer(plain->tensor_bytes())};
      Slots slots[2];
      const int64_t ld = gap == 0 ? 0 : cols + gap;
      const size_t before = cuda_.launches.size();
      run(*fused, {.rows = rows,
                   .x = {gate_in.data(), ld},
                   .up = {up_in.data(), ld},
                   .tensor = {got[0].data()},
                   .step = &step,
                   .scales = slots[0],
                   .grad = {grad_in.data(), ld},
                   .up_tensor = {got[1].data()},
                   .up_scales = slots[1]});
      EXPECT_EQ(cuda_.launches.size() - before, launches(*fused, step));
      for (size_t i = 0; i < 2; ++i) {
        Buffer x(reference::rounded_to(of[i], type), type, 0), expected(plain->tensor_bytes());
        Slots own;
        run(*plain, {.rows = rows,
                     .x = {x.data()},
                     .tensor = {expected.data()},
                     .step = &step,
                     .scales = own});
        EXPECT_EQ(std::memcmp(got[i].data(), expected.data(), expected.bytes()), 0) << i;
        EXPECT_EQ(own.most(), slots[i].most());
        EXPECT_TRUE(got[i].guard_is_whole());
      }
    }
  }
}

// The gradients of gate and up side by side are one tensor, with the scales of both.
class MergedCastTest : public ComputedCastTest {};
INSTANTIATE_TEST_SUITE_P(
    Shapes, MergedCastTest,
    ::testing::Values(Case{"delayed", 130, 512, 8}, Case{"delayed", 256, 256, 0},
                      Case{"blockwise", 300, 768, 16}, Case{"blockwise", 1, 256, 0},
                      Case{"tensorwise", 300, 512, 0}, Case{"tensorwise", 1, 256, 8},
                      Case{"rowwise", 130, 512, 8}, Case{"rowwise", 2, 10'240, 0},
                      Case{"mixed", 130, 512, 8}, Case{"apart", 130, 256, 0}));
TEST_P(MergedCastTest, IsTheCastOfBothGradients) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  const int64_t half = cols / 2;
  for (const auto& [type, activation] : {std::pair{Dtype::kBf16, Activation::kSilu},
                                         {Dtype::kF16, Activation::kGelu},
                                         {Dtype::kF32, Activation::kGeluTanh}}) {
    for (const bool first : {false, true}) {
      SCOPED_TRACE(f8::format("{} {}", to_string(type), first));
      QuantizerDesc desc{.operand = Tensor::kGradOutput,
                         .rows = first ? rows : rows + 150,
                         .cols = cols,
                         .recipe = recipe_of(recipe)};
      desc.dtype = type;
      const float8_step& step = first ? kFirstOfSteps : kOrdinaryStep;
      const auto plain = Quantizer::plan(context_, desc).value();
      Source{CastSource::kMergedGluBackward, activation}.set(desc);
      const auto fused = Quantizer::plan(context_, desc).value();
      const Matrix x = random(rows, cols, 5, type), grad = random(rows, half, 7, type);
      Matrix of = x;
      for (int64_t i = 0; i < rows * half; ++i) {
        const auto gate = static_cast<size_t>(i + i / half * half);
        const size_t up = gate + static_cast<size_t>(half);
        const auto both = emulation::glu_backward(activation, x.values[gate], x.values[up],
                                                  grad.values[static_cast<size_t>(i)], type);
        of.values[gate] = both.gate;
        of.values[up] = both.up;
      }
      Buffer x_in(x, type, gap), grad_in(grad, type, gap),
          of_in(reference::rounded_to(of, type), type);
      Buffer expected(plain->tensor_bytes()), got(plain->tensor_bytes());
      Slots plain_slots, fused_slots;
      run(*plain, {.rows = rows,
                   .x = {of_in.data()},
                   .tensor = {expected.data()},
                   .step = &step,
                   .scales = plain_slots});
      const size_t before = cuda_.launches.size();
      run(*fused, {.rows = rows,
                   .x = {x_in.data(), gap == 0 ? 0 : cols + gap},
                   .tensor = {got.data()},
                   .step = &step,
                   .scales = fused_slots,
                   .grad = {grad_in.data(), gap == 0 ? 0 : half + gap}});
      EXPECT_EQ(cuda_.launches.size() - before, launches(*fused, step));
      EXPECT_EQ(bytes(got), bytes(expected));
      EXPECT_EQ(plain_slots.most(), fused_slots.most());
      EXPECT_TRUE(got.guard_is_whole());
    }
  }
}

// With the sums of its columns and without them, which are those of a linear's dy.
TEST_P(ComputedCastTest, IsTheCastOfTheGradientOfAnActivation) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const auto& [type, activation, first] : {std::tuple{Dtype::kBf16, Activation::kGelu, false},
                                                {Dtype::kF16, Activation::kRelu2, true},
                                                {Dtype::kF32, Activation::kGeluTanh, false},
                                                {Dtype::kBf16, Activation::kSilu, true}}) {
    for (const bool sums : {false, true}) {
      SCOPED_TRACE(f8::format("{} {} {}", to_string(type), static_cast<int>(activation), sums));
      QuantizerDesc desc{.operand = Tensor::kGradOutput,
                         .rows = first ? rows : rows + 150,
                         .cols = cols,
                         .recipe = recipe_of(recipe)};
      desc.dtype = type;
      const float8_step& step = first ? kFirstOfSteps : kOrdinaryStep;
      const auto plain = Quantizer::plan(context_, desc).value();
      Source{CastSource::kActivationBackward, activation}.set(desc);
      desc.column_sums = sums;
      const auto fused = Quantizer::plan(context_, desc).value();

      const Matrix x = random(rows, cols, 5, type), grad = random(rows, cols, 7, type);
      Matrix of = x;
      for (size_t i = 0; i < x.values.size(); ++i) {
        of.values[i] =
            emulation::activation_backward(activation, x.values[i], grad.values[i], type);
      }
      of = reference::rounded_to(of, type);
      Buffer x_in(x, type, gap), grad_in(grad, type, gap), of_in(of, type, 0);
      Buffer expected(plain->tensor_bytes()), got(plain->tensor_bytes());
      Buffer of_columns(static_cast<size_t>(cols) * sizeof(float));
      Slots plain_slots, fused_slots;
      run(*plain, {.rows = rows,
                   .x = {of_in.data()},
                   .tensor = {expected.data()},
                   .step = &step,
                   .scales = plain_slots});
      const int64_t ld = gap == 0 ? 0 : cols + gap;
      const size_t before = cuda_.launches.size();
      QuantizeCall call{.rows = rows,
                        .x = {x_in.data(), ld},
                        .tensor = {got.data()},
                        .step = &step,
                        .scales = fused_slots,
                        .grad = {grad_in.data(), ld}};
      if (sums) call.column_sums = reinterpret_cast<float*>(of_columns.data());
      run(*fused, call);
      EXPECT_EQ(cuda_.launches.size() - before, launches(*fused, step) + (sums ? 1U : 0U));
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), expected.bytes()), 0);
      EXPECT_EQ(plain_slots.most(), fused_slots.most());
      EXPECT_TRUE(got.guard_is_whole() && of_columns.guard_is_whole());
      if (!sums) continue;
      const std::vector<float> want = reference::column_sums(of);
      EXPECT_EQ(std::memcmp(of_columns.data(), want.data(), of_columns.bytes()), 0);
    }
  }
}

// The words and the copies are those of a quantizer over ranks of what is computed, whose words others may
// raise: where ranks have other columns, each computes its own.
TEST_P(ComputedCastTest, IsTheCastOverRanks) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  constexpr std::pair<CastSource, Activation> kSources[] = {
      {CastSource::kGlu, Activation::kSilu},
      {CastSource::kActivation, Activation::kGelu},
      {CastSource::kActivationBackward, Activation::kRelu2},
      {CastSource::kGluBackward, Activation::kSilu}};
  for (const auto& [source, activation] : kSources) {
    SCOPED_TRACE(name_of(source));
    const bool both = source == CastSource::kGluBackward;
    const bool backward = both || source == CastSource::kActivationBackward;
    QuantizerDesc desc{.operand = backward ? Tensor::kGradOutput : Tensor::kInput,
                       .rows = rows + 3,
                       .cols = cols,
                       .recipe = recipe_of(recipe)};
    desc.over_ranks = true;
    const auto planned = Quantizer::plan(context_, desc);
    Source{source, activation}.set(desc);
    if (!planned) {  // delayed scaling, and blocks of rows that shards cut
      EXPECT_EQ(Quantizer::plan(context_, desc).error().code, planned.error().code);
      continue;
    }
    const auto& plain = planned.value();
    const auto fused = Quantizer::plan(context_, desc).value();
    ASSERT_EQ(fused->amax_words(), plain->amax_words());
    ASSERT_EQ(fused->row_amax_words(), plain->row_amax_words());
    const Matrix x = random(rows, cols, 5, desc.dtype), up = random(rows, cols, 6, desc.dtype);
    const Matrix grad = random(rows, cols, 7, desc.dtype);
    Matrix of[2] = {x, x};
    for (size_t i = 0; i < x.values.size(); ++i) {
      const float a = x.values[i], b = up.values[i], g = grad.values[i];
      const auto gradients = emulation::glu_backward(activation, a, b, g, desc.dtype);
      of[0].values[i] = both       ? gradients.gate
                        : backward ? emulation::activation_backward(activation, a, g, desc.dtype)
                        : source == CastSource::kGlu
                            ? emulation::glu(activation, a, b, desc.dtype)
                            : emulation::activated(activation, a, desc.dtype).value;
      of[1].values[i] = gradients.up;
    }
    Buffer of_x(x, desc.dtype, gap), of_up(up, desc.dtype, gap), of_grad(grad, desc.dtype, gap);
    Buffer workspace(std::max<size_t>(fused->workspace_bytes(), 16));
    const int64_t ld = gap == 0 ? 0 : cols + gap;
    std::vector<uint32_t> amax[2], row_amax[2];
    Buffer got[2] = {Buffer(plain->tensor_bytes()), Buffer(plain->tensor_bytes())};
    const auto words_of = [](std::vector<uint32_t>& words) {
      return words.empty() ? nullptr : words.data();
    };
    for (int i = 0; i < 2; ++i) {
      amax[i].assign(static_cast<size_t>(plain->amax_words()), 7);
      row_amax[i].assign(static_cast<size_t>(plain->row_amax_words()), 7);
    }
    QuantizeCall call{.rows = rows,
                      .x = {of_x.data(), ld},
                      .tensor = {got[0].data()},
                      .amax = words_of(amax[0]),
                      .row_amax = words_of(row_amax[0])};
    if (both || source == CastSource::kGlu) call.up = {of_up.data(), ld};
    if (backward) call.grad = {of_grad.data(), ld};
    if (both) {
      call.up_tensor.data = got[1].data();
      call.up_amax = words_of(amax[1]);
      call.up_row_amax = words_of(row_amax[1]);
    }
    call = with_workspace(call, workspace.data());
    ASSERT_TRUE(fused->find_amax(call, nullptr));
    for (int i = 0; i < (both ? 2 : 1); ++i) {
      Buffer h(reference::rounded_to(of[i], desc.dtype), desc.dtype), want(plain->tensor_bytes());
      auto own = amax[i], own_rows = row_amax[i];
      QuantizeCall of_h{.rows = rows,
                        .x = {h.data()},
                        .tensor = {want.data()},
                        .amax = words_of(own),
                        .row_amax = words_of(own_rows)};
      ASSERT_TRUE(plain->find_amax(of_h, nullptr));
      EXPECT_EQ(own, amax[i]);
      EXPECT_EQ(own_rows, row_amax[i]);
      // Another rank has larger values.
      for (auto* words : {&amax[i], &row_amax[i], &own, &own_rows}) {
        for (size_t w = 0; w < words->size(); w += 2) (*words)[w] += 3U << 23;
      }
      run(*plain, of_h);
      ASSERT_TRUE(fused->run(call, nullptr));
      EXPECT_EQ(bytes(got[i]), bytes(want)) << i;
    }
    EXPECT_TRUE(cuda_.faults.empty());
    EXPECT_TRUE(workspace.guard_is_whole());
  }
}

}  // namespace
}  // namespace f8::runtime
