// The casts of the gradients of activations and of gated ones, as two tensors and as one, on an emulated device: the bits of
// casts of these.
#include "tests/unit/runtime/quantize/computed_cast_fixture.hpp"

namespace f8::runtime {
namespace {

class ComputedGradientTest : public ComputedCastTest {};
INSTANTIATE_TEST_SUITE_P(Shapes, ComputedGradientTest, ::testing::ValuesIn(kComputedCases));

TEST_P(ComputedGradientTest, IsTheCastOfTheGradients) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const auto& [type, activation] : {std::pair{Dtype::kBf16, Activation::kSilu},
                                         {Dtype::kF16, Activation::kSilu},
                                         {Dtype::kF32, Activation::kSilu},
                                         {Dtype::kBf16, Activation::kGeluTanh}}) {
    for (const auto& [first, less, sums] : {std::tuple{false, false, false},
                                            {true, false, false},
                                            {false, true, false},
                                            {false, false, true},
                                            {true, true, true}}) {
      SCOPED_TRACE(f8::format("{} {} {} {}", to_string(type), first, less, sums));
      QuantizerDesc desc = of_gradient(type, first);
      const float8_step& step = first ? kFirstOfSteps : kOrdinaryStep;
      const auto plain = Quantizer::plan(context_, desc).value();
      CastCaseSource{CastSource::kGluBackward, activation}.set(desc);
      const size_t most = Quantizer::plan(context_, desc).value()->workspace_bytes();
      desc.less_workspace = less;
      desc.column_sums = sums;
      const auto fused = Quantizer::plan(context_, desc).value();
      EXPECT_EQ(fused->workspace_bytes() > 0, sums || recipe != "blockwise");
      EXPECT_EQ(fused->workspace_bytes(false) > 0,
                sums || (recipe != "blockwise" && recipe != "delayed"));
      const auto gradients = 2 * static_cast<size_t>(rows * cols) * size_bytes(type);
      if (less && !sums && recipe == "tensorwise") {
        EXPECT_LT(fused->workspace_bytes(), most - gradients + 4096);
      }

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
      Buffer of_columns(2 * static_cast<size_t>(cols) * sizeof(float));
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
                   .up_scales = slots[1],
                   .column_sums = sums ? reinterpret_cast<float*>(of_columns.data()) : nullptr});
      EXPECT_EQ(cuda_.launches.size() - before, launches(*fused, step) + (sums ? 2U : 0U));
      for (size_t i = 0; i < 2; ++i) {
        Slots own;
        EXPECT_EQ(bytes(got[i]), cast_of(*plain, of[i], step, own)) << i;
        EXPECT_EQ(own.most(), slots[i].most());
        EXPECT_TRUE(got[i].guard_is_whole());
        if (!sums) continue;
        const std::vector<float> want = reference::column_sums(reference::rounded_to(of[i], type));
        const size_t bytes_of_one = of_columns.bytes() / 2;
        EXPECT_EQ(std::memcmp(
                      static_cast<char*>(static_cast<void*>(of_columns.data())) + i * bytes_of_one,
                      want.data(), bytes_of_one),
                  0);
      }
      EXPECT_TRUE(of_columns.guard_is_whole());
    }
  }
}

// The gradients of gate and up side by side are one tensor, with the scales of both.
class MergedCastTest : public ComputedGradientTest {};
INSTANTIATE_TEST_SUITE_P(
    Shapes, MergedCastTest,
    ::testing::Values(ComputedCase{"delayed", 130, 512, 8}, ComputedCase{"delayed", 256, 256, 0},
                      ComputedCase{"blockwise", 300, 768, 16}, ComputedCase{"blockwise", 1, 256, 0},
                      ComputedCase{"tensorwise", 300, 512, 0},
                      ComputedCase{"tensorwise", 1, 256, 8}, ComputedCase{"rowwise", 130, 512, 8},
                      ComputedCase{"rowwise", 2, 10'240, 0}, ComputedCase{"mixed", 130, 512, 8},
                      ComputedCase{"apart", 130, 256, 0}));
TEST_P(MergedCastTest, IsTheCastOfBothGradients) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  const int64_t half = cols / 2;
  for (const auto& [type, activation, sums] : {std::tuple{Dtype::kBf16, Activation::kSilu, false},
                                               {Dtype::kF16, Activation::kGelu, true},
                                               {Dtype::kF32, Activation::kGeluTanh, false}}) {
    for (const auto& [first, up_first] :
         {std::pair{false, false}, {true, false}, {true, true}, {false, true}}) {
      SCOPED_TRACE(f8::format("{} {} {}", to_string(type), first, up_first));
      QuantizerDesc desc = of_gradient(type, first);
      const float8_step& step = first ? kFirstOfSteps : kOrdinaryStep;
      const auto plain = Quantizer::plan(context_, desc).value();
      CastCaseSource{
          up_first ? CastSource::kMergedGluBackwardUpFirst : CastSource::kMergedGluBackward,
          activation}
          .set(desc);
      desc.column_sums = sums;
      const auto fused = Quantizer::plan(context_, desc).value();
      const Matrix x = random(rows, cols, 5, type), grad = random(rows, half, 7, type);
      Matrix of = x;
      for (int64_t i = 0; i < rows * half; ++i) {
        const auto at_first = static_cast<size_t>(i + i / half * half);
        const size_t at_second = at_first + static_cast<size_t>(half);
        const auto [gate, up] =
            up_first ? std::pair{at_second, at_first} : std::pair{at_first, at_second};
        const auto both = emulation::glu_backward(activation, x.values[gate], x.values[up],
                                                  grad.values[static_cast<size_t>(i)], type);
        of.values[gate] = both.gate;
        of.values[up] = both.up;
      }
      Buffer x_in(x, type, gap), grad_in(grad, type, gap), got(plain->tensor_bytes());
      Buffer of_columns(static_cast<size_t>(cols) * sizeof(float));
      Slots plain_slots, fused_slots;
      const size_t before = cuda_.launches.size();
      run(*fused, {.rows = rows,
                   .x = {x_in.data(), gap == 0 ? 0 : cols + gap},
                   .tensor = {got.data()},
                   .step = &step,
                   .scales = fused_slots,
                   .grad = {grad_in.data(), gap == 0 ? 0 : half + gap},
                   .column_sums = sums ? reinterpret_cast<float*>(of_columns.data()) : nullptr});
      EXPECT_EQ(cuda_.launches.size() - before, launches(*fused, step) + (sums ? 1U : 0U));
      EXPECT_EQ(bytes(got), cast_of(*plain, of, step, plain_slots));
      EXPECT_EQ(plain_slots.most(), fused_slots.most());
      EXPECT_TRUE(got.guard_is_whole() && of_columns.guard_is_whole());
      if (!sums) continue;
      const std::vector<float> want = reference::column_sums(reference::rounded_to(of, type));
      EXPECT_EQ(std::memcmp(of_columns.data(), want.data(), of_columns.bytes()), 0);
    }
  }
}

// With the sums of its columns and without them, which are those of a linear's dy.
TEST_P(ComputedGradientTest, IsTheCastOfTheGradientOfAnActivation) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const auto& [type, activation, first] : {std::tuple{Dtype::kBf16, Activation::kGelu, false},
                                                {Dtype::kF16, Activation::kRelu2, true},
                                                {Dtype::kF32, Activation::kGeluTanh, false},
                                                {Dtype::kBf16, Activation::kSilu, true}}) {
    for (const bool sums : {false, true}) {
      SCOPED_TRACE(f8::format("{} {} {}", to_string(type), static_cast<int>(activation), sums));
      QuantizerDesc desc = of_gradient(type, first);
      const float8_step& step = first ? kFirstOfSteps : kOrdinaryStep;
      const auto plain = Quantizer::plan(context_, desc).value();
      CastCaseSource{CastSource::kActivationBackward, activation}.set(desc);
      desc.column_sums = sums;
      const auto fused = Quantizer::plan(context_, desc).value();

      const Matrix x = random(rows, cols, 5, type), grad = random(rows, cols, 7, type);
      Matrix of = x;
      for (size_t i = 0; i < x.values.size(); ++i) {
        of.values[i] =
            emulation::activation_backward(activation, x.values[i], grad.values[i], type);
      }
      of = reference::rounded_to(of, type);
      Buffer x_in(x, type, gap), grad_in(grad, type, gap), got(plain->tensor_bytes());
      Buffer of_columns(static_cast<size_t>(cols) * sizeof(float));
      Slots plain_slots, fused_slots;
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
      EXPECT_EQ(bytes(got), cast_of(*plain, of, step, plain_slots));
      EXPECT_EQ(plain_slots.most(), fused_slots.most());
      EXPECT_TRUE(got.guard_is_whole() && of_columns.guard_is_whole());
      if (!sums) continue;
      const std::vector<float> want = reference::column_sums(of);
      EXPECT_EQ(std::memcmp(of_columns.data(), want.data(), of_columns.bytes()), 0);
    }
  }
}

}  // namespace
}  // namespace f8::runtime
