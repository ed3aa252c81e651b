// The tensors at a linear's boundary: their types and their row strides, under every built-in
// recipe, against the CPU reference.

#include "runtime/linear/plan/kernels.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::describe;
using testing::FakeCublasLt;
using testing::FakeCuda;
using testing::Fixture;
using testing::says;

double rounding(Dtype type) {
  return type == Dtype::kF32 ? 1e-6 : type == Dtype::kF16 ? 4e-4 : 2.5e-3;
}

class LinearTensors : public ::testing::TestWithParam<const char*> {
 protected:
  void expect_no_faults() { EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front(); }
  void run(Fixture& s) {
    testing::run_step(s);
    expect_no_faults();
    EXPECT_TRUE(s.guards_are_whole());
  }
  static void expect_like_reference(Fixture& s) {
    const auto expected = s.expected();
    const Dtype dw = s.linear->desc().grad_weight_dtype;
    EXPECT_LT(reference::relative_error(expected.y, s.values_y()), rounding(s.type));
    EXPECT_LT(reference::relative_error(expected.dx, s.values_dx()), rounding(s.type));
    EXPECT_LT(reference::relative_error(expected.dw, s.values_dw()), rounding(dw));
  }
  void refused(const LinearDesc& desc, ErrorCode code, std::string_view part) {
    const auto linear = Linear::plan(cuda_.context(), desc);
    ASSERT_FALSE(linear);
    EXPECT_EQ(linear.error().code, code);
    EXPECT_TRUE(says(linear.error(), part)) << linear.error().message;
  }
  FakeCuda cuda_;
  FakeCublasLt library_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearTensors,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise"));

TEST_P(LinearTensors, OfEachTypeAreLikeTheReference) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const int64_t m : {150, 33}) {
      SCOPED_TRACE(f8::format("{} m={}", to_string(type), m));
      LinearDesc desc = describe(GetParam(), {150, 144, 272});
      desc.tensor_dtype = desc.grad_weight_dtype = type;
      Fixture s(cuda_, desc, m);
      run(s);
      expect_like_reference(s);
    }
  }
}

TEST_P(LinearTensors, WeightGradientsOfAnotherType) {
  const bool cast = find_recipe(GetParam()).value().at(Gemm::kGradWeight).is_fp8();
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Dtype dw : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      SCOPED_TRACE(f8::format("{} dw {}", to_string(type), to_string(dw)));
      LinearDesc desc = describe(GetParam(), {40, 48, 144});
      desc.tensor_dtype = type;
      desc.grad_weight_dtype = dw;
      if (!cast && dw != type && dw != Dtype::kF32) {
        refused(desc, ErrorCode::kUnsupported, "grad_weight_dtype");
        continue;
      }
      Fixture s(cuda_, desc, 40);
      run(s);
      expect_like_reference(s);
    }
  }
}

TEST_P(LinearTensors, BiasAndAccumulationInEachType) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    SCOPED_TRACE(to_string(type));
    LinearDesc desc = describe(GetParam(), {40, 48, 144});
    desc.tensor_dtype = desc.grad_weight_dtype = type;
    desc.bias = desc.accumulate_grad_weight = true;
    Fixture s(cuda_, desc, 40);
    run(s);
    BackwardCall again = s.backward();
    again.dw.accumulate = true;
    ASSERT_TRUE(s.linear->backward(again, nullptr));
    auto expected = s.expected();
    for (size_t i = 0; i < expected.y.size(); ++i) {
      expected.y[i] += static_cast<double>(s.biasm.values[i % 48]);
    }
    for (double& value : expected.dw) value *= 2;
    EXPECT_LT(reference::relative_error(expected.y, s.values_y()), rounding(type));
    EXPECT_LT(reference::relative_error(expected.dw, s.values_dw()), rounding(type));
    expect_no_faults();
  }
}

// The same bits, and what lies between rows neither read (it is NaN) nor written.
TEST_P(LinearTensors, RowsApartGiveTheSame) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    SCOPED_TRACE(to_string(type));
    LinearDesc desc = describe(GetParam(), {150, 48, 144});
    desc.tensor_dtype = desc.grad_weight_dtype = type;
    Fixture dense(cuda_, desc, 130);
    run(dense);
    Fixture apart(cuda_, desc, 130, 1, 24);
    run(apart);
    EXPECT_EQ(apart.values_y(), dense.values_y());
    EXPECT_EQ(apart.values_dx(), dense.values_dx());
    EXPECT_EQ(apart.values_dw(), dense.values_dw());

    if (!casts_weight(desc)) continue;
    testing::Fp8Weight weight(apart);
    ASSERT_TRUE(weight.run());
    ForwardCall call = apart.forward();
    call.w.fp8 = &weight.view;
    ASSERT_TRUE(apart.linear->forward(with_workspace(call, apart.workspace.data()), nullptr));
    EXPECT_EQ(apart.values_y(), dense.values_y());
  }
}

TEST_P(LinearTensors, AnEmptyBatchZeroesAGradientWhoseRowsAreApart) {
  LinearDesc desc = describe(GetParam(), {64, 48, 80});
  desc.tensor_dtype = desc.grad_weight_dtype = Dtype::kF16;
  Fixture s(cuda_, desc, 64, 1, 8);
  ASSERT_TRUE(s.linear->backward(
      {.m = 0, .dw = {s.dw.data(), 88}, .workspace = {s.workspace.data()}}, nullptr));
  for (const double value : s.values_dw()) ASSERT_EQ(value, 0);
}

TEST_P(LinearTensors, StridesThatNoCopyCanFollowAreNamed) {
  LinearDesc desc = describe(GetParam(), {64, 48, 80});
  Fixture s(cuda_, desc, 64);
  const size_t before = cuda_.launches.size();
  const auto refuse = [&](const Status& status, std::string_view part) {
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), part)) << status.error().message;
  };
  // Shorter than a row, no multiple of 16 bytes, negative, beyond what a kernel can address.
  for (const int64_t ld : {int64_t{40}, int64_t{81}, int64_t{84}, int64_t{-88}, kMaxDim + 8}) {
    using Change = std::function<void(ForwardCall&, BackwardCall&)>;
    const std::pair<const char*, Change> kForward[] = {
        {"float8_forward_args.x.ld", [&](ForwardCall& f, BackwardCall&) { f.x.ld = ld; }},
        {"float8_forward_args.w.ld", [&](ForwardCall& f, BackwardCall&) { f.w.ld = ld; }},
        {"float8_forward_args.y.ld", [&](ForwardCall& f, BackwardCall&) { f.y.ld = ld; }}};
    const std::pair<const char*, Change> kBackward[] = {
        {"float8_backward_args.dy.ld", [&](ForwardCall&, BackwardCall& b) { b.dy.ld = ld; }},
        {"float8_backward_args.dx.ld", [&](ForwardCall&, BackwardCall& b) { b.dx.ld = ld; }},
        {"float8_backward_args.dw.ld", [&](ForwardCall&, BackwardCall& b) { b.dw.ld = ld; }},
        {"float8_backward_args.x.ld", [&](ForwardCall&, BackwardCall& b) { b.x.ld = ld; }},
        {"float8_backward_args.w.ld", [&](ForwardCall&, BackwardCall& b) { b.w.ld = ld; }}};
    ForwardCall forward = s.forward();
    BackwardCall backward = s.backward();
    for (const auto& [name, change] : kForward) {
      change(forward = s.forward(), backward);
      refuse(s.linear->forward(forward, nullptr), name);
    }
    for (const auto& [name, change] : kBackward) {
      change(forward, backward = s.backward());
      refuse(s.linear->backward(backward, nullptr), name);
    }
    if (!casts_weight(desc)) continue;
    testing::Fp8Weight weight(s);
    QuantizeCall call = weight.call();
    call.x.ld = ld;
    refuse(weight.run(call), "x.ld");
  }
  EXPECT_EQ(cuda_.launches.size(), before);
}

TEST_F(LinearTensors, HighPrecisionHasTheTensorsType) {
  LinearDesc desc = describe("rowwise_with_gw_hp", {64, 48, 80});
  desc.tensor_dtype = desc.grad_weight_dtype = Dtype::kF16;
  const auto kernels = linear_kernels(desc);
  ASSERT_TRUE(kernels) << kernels.error().message;
  EXPECT_EQ(kernels->gemms[2]->a, Dtype::kF16);
  EXPECT_EQ(kernels->gemms[0]->d, Dtype::kF16);
  for (CastSetting* operand : {&desc.recipe.gemms[2].a, &desc.recipe.gemms[2].b}) {
    operand->dtype = Dtype::kF32;
  }
  refused(desc, ErrorCode::kUnsupported, "high-precision operands of type f32");
  desc.tensor_dtype = Dtype::kE4m3;
  refused(desc, ErrorCode::kUnsupported, "tensor_dtype e4m3");
  desc.tensor_dtype = Dtype::kBf16;
  desc.grad_weight_dtype = Dtype::kE5m2;
  refused(desc, ErrorCode::kUnsupported, "grad_weight_dtype e5m2");
}

}  // namespace
}  // namespace f8::runtime
