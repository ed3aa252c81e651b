// Two GEMMs in one launch: what the launch is told, and when a linear uses it.
#include <algorithm>

#include "runtime/linear/plan/kernels.hpp"
#include "tests/fp8_rows.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;
using testing::FakeCuda;
using testing::Fixture;

GemmChoice group_choice(std::string_view config) {
  return GemmChoice{parse_gemm_kernel(Provider::kGenerated, config).value()};
}

// Operands of a GEMM in host memory, and its result in fp32.
struct Product {
  Product(Shape own, ScaleMode scale, uint64_t seed)
      : a(cast(own.m, own.k, scale, seed)),
        b(cast(own.n, own.k, scale, seed + 1)),
        bits_a(fp8_rows(a)),
        bits_b(fp8_rows(b)),
        d(static_cast<size_t>(own.m * own.n), -1.0F) {}

  static reference::Fp8Matrix cast(int64_t rows, int64_t cols, ScaleMode scale, uint64_t seed) {
    const auto over =
        scale == ScaleMode::kAxis ? reference::AmaxOver::kRow : reference::AmaxOver::kTensor;
    return reference::cast(reference::random_matrix(rows, cols, seed), over, Dtype::kE4m3, false);
  }
  [[nodiscard]] GemmCall call(int64_t m) {
    return {.a = bits_a.data(),
            .b = bits_b.data(),
            .d = d.data(),
            .inv_scale_a = a.inv_scales.data(),
            .inv_scale_b = b.inv_scales.data(),
            .m = m};
  }
  [[nodiscard]] double error() const {
    return reference::relative_error(reference::matmul(a, b),
                                     std::vector<double>(d.begin(), d.end()));
  }

  reference::Fp8Matrix a, b;
  std::vector<uint8_t> bits_a, bits_b;
  std::vector<float> d;
};

class GroupedGemmTest : public ::testing::Test {
 protected:
  static GemmDesc describe(Gemm gemm, Shape shape, ScaleMode scale = ScaleMode::kTensor) {
    return {.gemm = gemm, .shape = shape, .d = Dtype::kF32, .scale = scale};
  }
  std::shared_ptr<const GroupedGemm> pair(Shape shape, const char* config,
                                          ScaleMode scale = ScaleMode::kTensor) {
    return GroupedGemm::create(context_, describe(Gemm::kGradInput, shape, scale),
                               describe(Gemm::kGradWeight, shape, scale), group_choice(config))
        .value();
  }
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
};

TEST_F(GroupedGemmTest, ComputesBoth) {
  for (const ScaleMode scale : {ScaleMode::kTensor, ScaleMode::kAxis}) {
    const Shape planned{40, 48, 32};
    const auto both = pair(planned, "64x64s4c1x1w1g8", scale);
    for (const int64_t m : {40, 19, 1}) {
      const Shape called{m, planned.n, planned.k};
      Product dx(gemm_shape(called, Gemm::kGradInput), scale, 1);
      Product dw(gemm_shape(called, Gemm::kGradWeight), scale, 5);
      const size_t before = cuda_.launches.size();
      ASSERT_TRUE(both->run(dx.call(m), dw.call(m), nullptr));
      EXPECT_EQ(cuda_.launches.size(), before + 1);
      EXPECT_LT(dx.error(), 1e-6) << "m=" << m;
      EXPECT_LT(dw.error(), 1e-6) << "m=" << m;
      ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
    }
  }
}

// The GEMM with the longer K comes first and the grid is that of both. A CTA without its share of
// the first takes as many more tiles of the second as take about as long (the tail-balancing
// offset).
TEST_F(GroupedGemmTest, WhatTheLaunchIsTold) {
  cuda_.emulate = false;
  alignas(16) static uint8_t bytes[64];
  const float* scale = reinterpret_cast<const float*>(bytes);
  struct Case {
    Shape shape;
    int64_t m;
    unsigned first_k, second_k, extra, grid;
  };
  // grad_input contracts n, grad_weight m; a tile costs 512 of K besides its own K.
  for (const Case& c :
       {Case{{8192, 4096, 4096}, 8192, 8192, 4096, 2, 132},
        Case{{8192, 4096, 4096}, 4096, 4096, 4096, 1, 132},
        Case{{8192, 4096, 4096}, 512, 4096, 512, 5, 132},
        Case{{8192, 512, 256}, 8192, 8192, 512, 9, 68}, Case{{256, 128, 256}, 256, 256, 128, 1, 3},
        Case{{64, 128, 256}, 17, 128, 17, 1, 2}}) {
    SCOPED_TRACE(to_string(c.shape) + " called with m=" + std::to_string(c.m));
    const auto both = pair(c.shape, "128x256s4c1x1w2g16");
    GemmCall dx{bytes, bytes, bytes, scale, scale, c.m};
    GemmCall dw = dx;
    ASSERT_TRUE(both->run(dx, dw, nullptr));
    const testing::FakeLaunch& launch = cuda_.launches.back();
    const kernels::GemmArgs& args = launch.gemm;
    EXPECT_EQ(args.problems[0].k, c.first_k);
    EXPECT_EQ(args.problems[1].k, c.second_k);
    EXPECT_EQ(args.tail_offset, c.extra);
    EXPECT_EQ(args.raster_group, 16U);
    EXPECT_EQ(launch.grid, c.grid);
    const Shape own_dx = gemm_shape({c.m, c.shape.n, c.shape.k}, Gemm::kGradInput);
    const auto& of_dx = args.problems[own_dx.k == c.first_k ? 0 : 1];
    EXPECT_EQ(of_dx.m, static_cast<unsigned>(own_dx.m));
    EXPECT_EQ(of_dx.n, static_cast<unsigned>(own_dx.n));
    EXPECT_TRUE(launch.kernel.starts_with("gemm2/"));
  }
}

TEST_F(GroupedGemmTest, FitsWhatIsAlike) {
  const GemmDesc dx = describe(Gemm::kGradInput, {64, 64, 64});
  GemmDesc dw = describe(Gemm::kGradWeight, {64, 64, 64});
  const GemmChoice choice = group_choice("128x128s4c1x1w2g8");
  EXPECT_TRUE(GroupedGemm::fits(dx, choice, dw, choice));
  EXPECT_FALSE(GroupedGemm::fits(dx, choice, dw, group_choice("128x128s4c1x1w2g16")));
  EXPECT_FALSE(GroupedGemm::fits(dx, choice, dw,
                                 GemmChoice{parse_gemm_kernel(Provider::kCublasLt, "h0").value()}));
  for (const auto change :
       {+[](GemmDesc& d) { d.d = Dtype::kBf16; }, +[](GemmDesc& d) { d.a = Dtype::kE5m2; },
        +[](GemmDesc& d) { d.scale = ScaleMode::kAxis; }, +[](GemmDesc& d) { d.fast = true; },
        +[](GemmDesc& d) { d.add = true; }, +[](GemmDesc& d) { d.amax = true; },
        +[](GemmDesc& d) { d.a = d.b = Dtype::kBf16; }}) {
    GemmDesc other = dw;
    change(other);
    EXPECT_FALSE(GroupedGemm::fits(dx, choice, other, choice));
    EXPECT_EQ(GroupedGemm::create(context_, dx, other, choice).error().code,
              ErrorCode::kInvalidArgument);
  }
}

TEST_F(GroupedGemmTest, BothCallsAreChecked) {
  alignas(16) static uint8_t bytes[64];
  const float* scale = reinterpret_cast<const float*>(bytes);
  const auto both = pair({64, 64, 64}, "128x128s4c1x1w2g8");
  const GemmCall good{bytes, bytes, bytes, scale, scale, 64};
  GemmCall bad = good;
  bad.b = nullptr;
  for (const Status& status : {both->run(bad, good, nullptr), both->run(good, bad, nullptr)}) {
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_TRUE(cuda_.launches.empty());
}

// --- in a linear

LinearDesc with_choices(const char* recipe, const char* grad_input, const char* grad_weight) {
  LinearDesc desc = testing::describe(recipe, {70, 48, 144});
  desc.choices[1] = group_choice(grad_input);
  desc.choices[2] = group_choice(grad_weight);
  return desc;
}

size_t pairs(const FakeCuda& cuda, size_t first) {
  return static_cast<size_t>(
      std::count_if(cuda.launches.begin() + static_cast<std::ptrdiff_t>(first), cuda.launches.end(),
                    [](const auto& launch) { return launch.kernel.starts_with("gemm2/"); }));
}

bool lists_a_pair(const LinearDesc& desc) {
  const auto specs = choose_kernels(desc, nullptr, 132)->specs();
  return std::ranges::any_of(specs,
                             [](const auto& s) { return codegen::key(s).starts_with("gemm2/"); });
}

class LinearPairTest : public ::testing::TestWithParam<const char*> {
 protected:
  FakeCuda cuda_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearPairTest,
                         ::testing::Values("tensorwise", "rowwise", "delayed"));

TEST_P(LinearPairTest, OneConfigurationIsOneLaunch) {
  const LinearDesc desc = with_choices(GetParam(), "64x64s4c1x1w1g8", "64x64s4c1x1w1g8");
  EXPECT_TRUE(lists_a_pair(desc));
  Fixture s(cuda_, desc, 70);
  ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
  const size_t before = cuda_.launches.size();
  ASSERT_TRUE(s.linear->backward(s.backward(), nullptr));
  EXPECT_EQ(pairs(cuda_, before), 1U);
  const auto dx = s.dx.bf16();
  const auto dw = s.dw.bf16();
  EXPECT_LT(reference::relative_error(s.expected().dx, dx), 2.5e-3);
  EXPECT_LT(reference::relative_error(s.expected().dw, dw), 2.5e-3);

  // One gradient alone is a launch of its own, to the same bits.
  for (const bool first : {true, false}) {
    Fixture alone(cuda_, desc, 70);
    ASSERT_TRUE(alone.linear->forward(alone.forward(), nullptr));
    const size_t from = cuda_.launches.size();
    BackwardCall call = alone.backward();
    (first ? call.dw : call.dx) = {};
    ASSERT_TRUE(alone.linear->backward(call, nullptr));
    EXPECT_EQ(pairs(cuda_, from), 0U);
    EXPECT_EQ(first ? alone.dx.bf16() : alone.dw.bf16(), first ? dx : dw);
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

TEST_P(LinearPairTest, OtherwiseTwo) {
  LinearDesc other_group = with_choices(GetParam(), "64x64s4c1x1w1g8", "64x64s4c1x1w1g16");
  LinearDesc other_type = with_choices(GetParam(), "64x64s4c1x1w1g8", "64x64s4c1x1w1g8");
  other_type.grad_weight_dtype = Dtype::kF32;
  LinearDesc no_dx = with_choices(GetParam(), "64x64s4c1x1w1g8", "64x64s4c1x1w1g8");
  no_dx.needs_grad_input = false;
  for (const LinearDesc& desc : {other_group, other_type, no_dx}) {
    EXPECT_FALSE(lists_a_pair(desc));
    Fixture s(cuda_, desc, 70);
    ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
    const size_t before = cuda_.launches.size();
    ASSERT_TRUE(s.linear->backward(s.backward(), nullptr));
    EXPECT_EQ(pairs(cuda_, before), 0U);
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

// The GEMM that adds is another kernel than the one that does not.
TEST_P(LinearPairTest, AnAccumulatingCallIsTwo) {
  LinearDesc desc = with_choices(GetParam(), "64x64s4c1x1w1g8", "64x64s4c1x1w1g8");
  desc.accumulate_grad_weight = true;
  Fixture s(cuda_, desc, 70);
  ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
  ASSERT_TRUE(s.linear->backward(s.backward(), nullptr));
  const size_t before = cuda_.launches.size();
  BackwardCall again = s.backward();
  again.dw.accumulate = true;
  ASSERT_TRUE(s.linear->backward(again, nullptr));
  EXPECT_EQ(pairs(cuda_, before), 0U);
  EXPECT_LT(reference::relative_error(s.expected().dx, s.dx.bf16()), 2.5e-3);
  auto twice = s.expected().dw;
  for (double& v : twice) v *= 2;
  EXPECT_LT(reference::relative_error(twice, s.dw.bf16()), 5e-3);
}

}  // namespace
}  // namespace f8::runtime
