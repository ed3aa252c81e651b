// The accuracy of fp8: the signal-to-noise ratio of a linear's results against fp64 of the
// same bf16 tensors, for every recipe. The values reached are properties of each test
// (--gtest_output=json:FILE).
#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

constexpr double kForwardDb = 25;
constexpr double kGradientDb = 20;

class AccuracyTest : public GpuTestWith<const char*> {
 protected:
  void SetUp() override {
    GpuTestWith::SetUp();
    if (!IsSkipped()) skip_without_library(GetParam());
  }
  void report(const std::string& name, double db) {
    RecordProperty(name, f8::format("{:.2f}", db));
  }
};
INSTANTIATE_TEST_SUITE_P(Recipes, AccuracyTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(AccuracyTest, AgainstHighPrecision) {
  const Shape shape{512, 384, 4096};
  const auto linear = Linear::plan(context_, describe(GetParam(), shape));
  F8_ASSERT_OK(linear);
  for (const auto& [name, distribution] :
       {std::pair{"normal", reference::Distribution::kNormal},
        std::pair{"outliers", reference::Distribution::kOutliers}}) {
    SCOPED_TRACE(f8::format("{} {} x {} seed 21", GetParam(), to_string(shape), name));
    const Tensors t(context(), **linear, shape.m, 21, distribution);
    F8_ASSERT_OK((*linear)->forward(t.forward(), nullptr));
    F8_ASSERT_OK((*linear)->backward(t.backward(), nullptr));
    using reference::transpose;
    const double y = reference::sqnr_db(reference::matmul(t.x, t.w), t.y.bf16());
    const double dx = reference::sqnr_db(reference::matmul(t.dy, transpose(t.w)), t.dx.bf16());
    const double dw =
        reference::sqnr_db(reference::matmul(transpose(t.dy), transpose(t.x)), t.dw.bf16());
    report(f8::format("y_db_{}", name), y);
    report(f8::format("dx_db_{}", name), dx);
    report(f8::format("dw_db_{}", name), dw);
    EXPECT_GE(y, kForwardDb);
    EXPECT_GE(dx, kGradientDb);
    EXPECT_GE(dw, kGradientDb);
  }
}

// Fast and promoted fp32 accumulation, at the largest K of the contract: fast keeps about 14 bits.
TEST_F(GpuTest, AccuracyOfAccumulation) {
  for (const int64_t k : {1024, 4096, 32768}) {
    for (const bool fast : {true, false}) {
      const Shape own{256, 512, k};
      const GemmDesc desc{.shape = own, .fast = fast};
      const auto plan = GemmPlan::create(context_, desc, GemmPlan::choose(context(), desc).value());
      F8_ASSERT_OK(plan);
      const GemmOperands x(context(), own, desc.a, desc.b, desc.scale, 31);
      const DeviceBuffer d(context(), static_cast<size_t>(own.m * own.n) * 2);
      const DeviceBuffer workspace(context(), std::max<size_t>((*plan)->workspace_bytes(), 16));
      F8_ASSERT_OK((*plan)->run(x.call(d, own.m), workspace.as(), nullptr));
      const int64_t step = 8;
      const double error = reference::relative_error(reference::matmul(x.sampled_a(step), x.b),
                                                     sampled_rows(d.bf16(), own.n, step));
      const std::string name = f8::format("{}_k{}", fast ? "fast" : "precise", k);
      RecordProperty(name, f8::format("{:.2e}", error));
      EXPECT_LE(error, fast ? kFastBound : kPreciseBound) << name;
    }
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
