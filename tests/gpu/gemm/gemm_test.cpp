// The generated matmul against fp64: every configuration that the tuner may choose, in every mix of
// types, scales and accumulation; and odd shapes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "tests/gpu/gemm_operands.hpp"

namespace f8::runtime::gpu {
namespace {

// Config of a spec left to the test.
class GemmConfigTest : public GpuTestWith<codegen::GemmSpec> {};

std::vector<codegen::GemmSpec> specs() {
  std::vector<codegen::GemmSpec> out;
  for (const Dtype a : {Dtype::kE4m3, Dtype::kE5m2}) {
    for (const Dtype b : {Dtype::kE4m3, Dtype::kE5m2}) {
      for (const Dtype d : {Dtype::kBf16, Dtype::kF32}) {
        for (const auto scale : {codegen::ScaleMode::kTensor, codegen::ScaleMode::kAxis}) {
          for (const bool fast : {true, false}) {
            out.push_back({.a = a, .b = b, .d = d, .scale = scale, .fast = fast, .config = {}});
          }
        }
        for (const auto scale :
             {codegen::ScaleMode::kBlock1x128, codegen::ScaleMode::kBlock128x128}) {
          if (b == Dtype::kE5m2 || (a == Dtype::kE5m2 && d == Dtype::kF32)) continue;
          out.push_back({.a = a, .b = b, .d = d, .scale = scale, .fast = false, .config = {}});
        }
      }
    }
  }
  for (const bool fast : {true, false}) {
    codegen::GemmSpec pow2{.scale = codegen::ScaleMode::kAxis, .fast = fast};
    pow2.pow2 = true;
    out.push_back(pow2);
  }
  return out;
}

std::string name(const ::testing::TestParamInfo<codegen::GemmSpec>& suite) {
  const codegen::GemmSpec& s = suite.param;
  return f8::format("{}_{}_{}_{}_{}{}", to_string(s.a), to_string(s.b), to_string(s.d),
                    to_string(s.scale), s.fast ? "fast" : "precise", s.pow2 ? "_pow2" : "");
}
INSTANTIATE_TEST_SUITE_P(Specs, GemmConfigTest, ::testing::ValuesIn(specs()), name);

// The references that several tests of this program compare with, computed once.
const std::vector<double>& expected_gemm(const GemmOperands& x, const std::string& which) {
  static std::map<std::string, std::vector<double>> known;
  const auto found = known.find(which);
  if (found != known.end()) return found->second;
  return known.emplace(which, reference::matmul(x.a, x.b)).first->second;
}

// No tile divides this shape; several tiles of any size along each side; k ends inside a block.
TEST_P(GemmConfigTest, EveryCandidate) {
  const Shape own{401, 592, 720};
  const uint64_t seed = 11;
  const GemmOperands x(context(), own, GetParam().a, GetParam().b, GetParam().scale, seed, false,
                       false, GetParam().pow2);
  const std::string which = f8::format("{}{}{}{}", to_string(x.a.dtype), to_string(x.b.dtype),
                                       to_string(GetParam().scale), GetParam().pow2);
  const auto& expected = expected_gemm(x, which);
  const DeviceBuffer d(context(), expected.size() * size_bytes(GetParam().d));
  const auto candidates = codegen::gemm_candidates(GetParam());
  std::vector<codegen::KernelSpec> kernels;
  for (const auto& config : candidates) {
    codegen::GemmSpec spec = GetParam();
    spec.config = config;
    kernels.emplace_back(spec);
  }
  compile(kernels);
  const auto run = [&](const GemmDesc& desc, const GemmConfig& config) {
    const auto plan = GemmPlan::create(context_, desc, {{.config = config}});
    F8_ASSERT_OK(plan);
    const_cast<DeviceBuffer&>(d).poison();
    F8_ASSERT_OK((*plan)->run(x.call(d, own.m), nullptr, nullptr));
  };
  for (const auto& config : candidates) {
    codegen::GemmSpec spec = GetParam();
    spec.config = config;
    SCOPED_TRACE(f8::format("{} config {} shape {} seed {}", codegen::key(spec), key(config),
                            to_string(own), seed));
    GemmDesc desc{.gemm = Gemm::kOutput,
                  .shape = own,
                  .a = spec.a,
                  .b = spec.b,
                  .d = spec.d,
                  .scale = spec.scale,
                  .fast = spec.fast};
    std::vector<uint16_t> unpacked;
    if (spec.pow2) {
      run(desc, config);
      unpacked = d.download<uint16_t>();
    }
    desc.pow2 = spec.pow2;
    ASSERT_EQ(codegen::key(gemm_spec(desc, config)), codegen::key(spec));
    run(desc, config);
    if (HasFatalFailure()) return;
    if (spec.pow2) {
      EXPECT_EQ(d.download<uint16_t>(), unpacked) << "not the bits of any scales";
    }
    const auto values = result(d, spec.d);
    EXPECT_TRUE(std::ranges::none_of(values, [](double v) { return std::isnan(v); }))
        << "an element was not written";
    EXPECT_LE(reference::relative_error(expected, values), spec.fast ? kFastBound : kPreciseBound);
    EXPECT_TRUE(d.guards_are_whole());
    if (HasFailure()) return;
  }
}

class GemmShapeTest : public GpuTestWith<int64_t> {
 protected:
  // Checks the cost model's choice at the planned m and, with the same plan, at `m`.
  void check(Gemm gemm, Shape linear, int64_t m, bool fast, codegen::ScaleMode scale,
             Dtype d_type) {
    const GemmDesc desc{.gemm = gemm,
                        .shape = linear,
                        .a = gemm == Gemm::kOutput ? Dtype::kE4m3 : Dtype::kE5m2,
                        .b = Dtype::kE4m3,
                        .d = d_type,
                        .scale = scale,
                        .fast = fast};
    const auto choice = GemmPlan::choose(context(), desc);
    F8_ASSERT_OK(choice);
    const auto plan = GemmPlan::create(context_, desc, *choice);
    F8_ASSERT_OK(plan);
    const Shape own = gemm_shape({m, linear.n, linear.k}, gemm);
    const uint64_t seed = static_cast<uint64_t>(own.m * 31 + own.n * 7 + own.k);
    SCOPED_TRACE(f8::format("{} {} {} {} {} called with m={} config {} seed {}", to_string(gemm),
                            to_string(linear), fast ? "fast" : "precise", to_string(scale),
                            to_string(d_type), m, config_text(*choice), seed));
    const GemmOperands x(context(), own, desc.a, desc.b, scale, seed);
    const DeviceBuffer d(context(), static_cast<size_t>(own.m * own.n) * size_bytes(d_type));
    F8_ASSERT_OK((*plan)->run(x.call(d, m), nullptr, nullptr));
    const auto values = result(d, d_type);
    EXPECT_TRUE(std::ranges::none_of(values, [](double v) { return std::isnan(v); }))
        << "an element was not written";
    const int64_t step = std::max<int64_t>(1, own.m * own.n * own.k / 60'000'000);
    // A result of few elements may happen to cancel, and its error with it not.
    const double few = own.m * own.n < 256 ? 2 : 1;
    EXPECT_LE(reference::relative_error(reference::matmul(x.sampled_a(step), x.b),
                                        sampled_rows(values, own.n, step)),
              few * (fast ? kFastBound : kPreciseBound));
    EXPECT_TRUE(d.guards_are_whole());
  }
};
INSTANTIATE_TEST_SUITE_P(M, GemmShapeTest, ::testing::Values(1, 17, 1000, 4095));

constexpr codegen::ScaleMode kBlocks[] = {codegen::ScaleMode::kBlock1x128,
                                          codegen::ScaleMode::kBlock128x128};

TEST_P(GemmShapeTest, OddShapes) {
  for (const int64_t n : {16, 48, 2064}) {
    for (const int64_t k : {16, 48, 2064}) {
      const Shape shape{GetParam(), n, k};
      check(Gemm::kOutput, shape, shape.m, true, codegen::ScaleMode::kTensor, Dtype::kBf16);
      check(Gemm::kGradInput, shape, shape.m, false, codegen::ScaleMode::kAxis, Dtype::kBf16);
      check(Gemm::kGradWeight, shape, shape.m, false, codegen::ScaleMode::kTensor, Dtype::kF32);
      check(Gemm::kOutput, shape, shape.m, false, codegen::ScaleMode::kBlock128x128, Dtype::kBf16);
      check(Gemm::kGradWeight, shape, shape.m, false, codegen::ScaleMode::kBlock1x128,
            Dtype::kBf16);
      if (HasFailure()) return;
    }
  }
}

TEST_P(GemmShapeTest, FewerRowsThanPlanned) {
  for (const Gemm gemm : kGemms) {
    check(gemm, {4096, 592, 272}, GetParam(), gemm == Gemm::kOutput, codegen::ScaleMode::kAxis,
          Dtype::kBf16);
    for (const auto scale : kBlocks) {
      check(gemm, {4096, 592, 272}, GetParam(), false, scale, Dtype::kBf16);
    }
  }
}

class GemmTest : public GpuTest {};

// Zero scales, infinities and NaN come out as the arithmetic says, not as what was in memory.
TEST_F(GemmTest, NonFiniteScalesReachTheirRowAlone) {
  const Shape own{130, 144, 272};
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const bool pow2 : {false, true}) {
    GemmOperands x(context(), own, Dtype::kE4m3, Dtype::kE4m3, codegen::ScaleMode::kAxis, 5, false,
                   false, pow2);
    auto rows = x.a.inv_scales;
    rows[7] = kNan;
    rows[129] = kInfinity;
    x.inv_a.upload(rows.data(), rows.size() * sizeof(float));
    auto columns = x.b.inv_scales;
    columns[9] = kNan;
    columns[140] = kInfinity;
    x.inv_b.upload(columns.data(), columns.size() * sizeof(float));
    const GemmDesc desc{
        .shape = own, .scale = codegen::ScaleMode::kAxis, .fast = true, .pow2 = pow2};
    const auto plan = GemmPlan::create(context_, desc, GemmPlan::choose(context(), desc).value());
    F8_ASSERT_OK(plan);
    const DeviceBuffer d(context(), static_cast<size_t>(own.m * own.n) * 2);
    F8_ASSERT_OK((*plan)->run(x.call(d, own.m), nullptr, nullptr));
    const auto values = d.bf16();
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t row = i / static_cast<size_t>(own.n);
      const size_t column = i % static_cast<size_t>(own.n);
      if (row == 7 || column == 9) {
        ASSERT_TRUE(std::isnan(values[i])) << i;
      } else if (row == 129 || column == 140) {
        ASSERT_FALSE(std::isfinite(values[i])) << i;
      } else {
        ASSERT_TRUE(std::isfinite(values[i])) << i;
      }
    }
  }
}

TEST_F(GemmTest, SameBitsEveryTime) {
  const Shape own{1000, 2064, 4096};
  const GemmOperands x(context(), own, Dtype::kE4m3, Dtype::kE4m3, codegen::ScaleMode::kTensor, 9);
  for (const bool fast : {true, false}) {
    const GemmDesc desc{.shape = own, .fast = fast};
    const auto plan = GemmPlan::create(context_, desc, GemmPlan::choose(context(), desc).value());
    F8_ASSERT_OK(plan);
    DeviceBuffer d(context(), static_cast<size_t>(own.m * own.n) * 2);
    std::vector<uint16_t> first;
    for (int i = 0; i < 10; ++i) {
      d.poison();
      F8_ASSERT_OK((*plan)->run(x.call(d, own.m), nullptr, nullptr));
      const auto bits = d.download<uint16_t>();
      if (i == 0) first = bits;
      ASSERT_EQ(bits, first) << "run " << i;
    }
  }
}

TEST_F(GemmTest, MisuseLeavesTheDeviceUsable) {
  const Shape own{128, 128, 128};
  const GemmOperands x(context(), own, Dtype::kE4m3, Dtype::kE4m3, codegen::ScaleMode::kTensor, 9);
  const GemmDesc desc{.shape = own, .fast = true};
  const auto plan = GemmPlan::create(context_, desc, GemmPlan::choose(context(), desc).value());
  F8_ASSERT_OK(plan);
  const DeviceBuffer d(context(), static_cast<size_t>(own.m * own.n) * 2);
  GemmCall bad = x.call(d, own.m);
  bad.a = nullptr;
  EXPECT_EQ((*plan)->run(bad, nullptr, nullptr).error().code, ErrorCode::kInvalidArgument);
  bad = x.call(d, own.m + 1);
  EXPECT_EQ((*plan)->run(bad, nullptr, nullptr).error().code, ErrorCode::kInvalidArgument);
  F8_ASSERT_OK((*plan)->run(x.call(d, own.m), nullptr, nullptr));
}

}  // namespace
}  // namespace f8::runtime::gpu
