// MLPs in a sweep: they are measured behind their linears, with the kernels of these.
#include "recipes/mlp.hpp"
#include "tests/unit/tools/search/sweep_fixture.hpp"
#include "tools/tuner/search/sweep/measured.hpp"

namespace f8::tuner {
namespace {

class MlpSweepTest : public SweepTest {
 protected:
  void SetUp() override {
    SweepTest::SetUp();
    request_.shapes.clear();
    request_.mlps = {shape_};
    machine_.ns = [](const Problem& p, const Candidate& s, double) {
      if (p.op == Op::kMlp) return s.impl == Impl::kBf16 ? 900e3 : 500e3;
      if (s.impl == Impl::kBf16) return 600e3;
      return s.impl == Impl::kFloat8 ? 40e3 + sum_of_kernels(s) : kernel_ns(s);
    };
  }
  [[nodiscard]] Problem mlp() const {
    return Problem::make(Op::kMlp, *find_recipe("tensorwise"), to_dims(shape_)).value();
  }
  TrialRow row(const Problem& problem, std::string_view impl) {
    const auto found = rows(problem, impl);
    EXPECT_EQ(found.size(), 1U) << problem.key() << " " << impl;
    return found.at(0);
  }

  MlpShape shape_{{256, 512, 256}, true, {}};
};

TEST_F(MlpSweepTest, AnMlpTakesTheKernelsOfItsLinears) {
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->end, SweepEnd::kDone);
  EXPECT_EQ(outcome->progress.done, outcome->progress.trials);
  const MlpLinears linears = linears_of(mlp()).value();
  EXPECT_EQ(linears.up.shape(), (Shape{256, 512, 256}));
  EXPECT_EQ(linears.down.shape(), (Shape{256, 256, 512}));
  for (const char* impl : {"float8", "bf16"}) {
    const TrialRow whole = row(mlp(), impl);
    ASSERT_EQ(whole.result.state, TrialState::kOk) << whole.result.reason;
    ASSERT_EQ(whole.result.kernels.size(), 6U);
    for (const auto& [linear, before] : {std::pair(linears.up, "up_"), {linears.down, "down_"}}) {
      for (const tuning_db::PartKernel& kernel : row(linear, impl).result.kernels) {
        const auto* taken = find_kernel(whole.result.kernels, before + kernel.part);
        ASSERT_NE(taken, nullptr) << before << kernel.part;
        EXPECT_EQ(taken->config, kernel.config);
        EXPECT_EQ(taken->provider, kernel.provider);
      }
    }
  }
  const TrialRow fp8 = row(mlp(), "float8");
  ASSERT_TRUE(fp8.result.ratio);
  EXPECT_NEAR(fp8.result.ratio->ratio, 1.8, 0.02);
  EXPECT_EQ(fp8.result.ratio->pair_uuid, row(mlp(), "bf16").uuid);
  const TuningTable table = open().table().value();
  ASSERT_EQ(table.mlps().size(), 1U);
  EXPECT_EQ(table.mlps().front().shape, (Shape{256, 512, 256}));
  EXPECT_EQ(table.mlps().front().gate, true);
  EXPECT_EQ(table.speedups().size(), 2U);
}

TEST_F(MlpSweepTest, LinearsThatWereMeasuredAreNotPlannedAgain) {
  EXPECT_EQ(plan().linears.size(), 3U);
  ASSERT_TRUE(sweep_all());
  const Database db = open();
  const Database* const databases[] = {&db};
  const auto known = mlp_kernels(mlp(), databases, h100());
  ASSERT_TRUE(known && *known);
  request_.mlp_kernels[mlp().key()] = **known;
  const SweepPlan again = plan();
  ASSERT_EQ(again.linears.size(), 1U);
  EXPECT_EQ(again.linears.front().problem, mlp());
  EXPECT_FALSE(again.linears.front().kernels.empty());
  // Another class of device has none of these kernels.
  DeviceClass other = h100();
  other.power_limit_w = 500;
  EXPECT_FALSE(mlp_kernels(mlp(), databases, other).value());
  // A linear that is asked for too is planned once.
  request_.mlp_kernels.clear();
  request_.shapes = {{{256, 512, 256}}};
  EXPECT_EQ(plan().linears.size(), 3U);
  request_.skipped = measured_linears(databases, request_, h100(), toolchain()).value();
  EXPECT_TRUE(plan().linears.empty());
}

TEST_F(MlpSweepTest, OfExpertsTakesTheirGroupedKernels) {
  shape_.groups = {.experts = 16, .skew = kZipf};
  request_.mlps = {shape_};
  request_.recipes = {"rowwise"};
  ASSERT_TRUE(sweep_all());
  const Problem of_experts =
      Problem::make(Op::kMlp, *find_recipe("rowwise"), to_dims(shape_)).value();
  const MlpLinears linears = linears_of(of_experts).value();
  EXPECT_EQ(linears.up.op, Op::kExperts);
  EXPECT_EQ(linears.up.shape().n, 1024) << "gate and up are one";
  const TrialRow whole = row(of_experts, "float8");
  ASSERT_EQ(whole.result.kernels.size(), 6U);
  EXPECT_EQ(whole.result.kernels.front().provider, Provider::kGenerated);
  EXPECT_EQ(open().table().value().mlps().front().groups, shape_.groups);
}

TEST_F(MlpSweepTest, WithoutItsLinearsItIsNotMeasured) {
  machine_.misbehaviour = [](const Problem& p, const Candidate& s) {
    return p.op == Op::kLinear && s.impl == Impl::kFloat8 ? Misbehaviour::kUnsupported
                                                          : Misbehaviour::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->end, SweepEnd::kDone);
  EXPECT_EQ(outcome->progress.done, outcome->progress.trials);
  for (const char* impl : {"float8", "bf16"}) {
    EXPECT_EQ(row(mlp(), impl).result.state, TrialState::kLaunchError);
    EXPECT_TRUE(row(mlp(), impl).result.reason.contains("its linears came to no time"));
  }
  EXPECT_TRUE(open().table().value().mlps().empty());
}

TEST(MlpChoices, AreSixKernels) {
  const std::string_view text =
      "cublaslt:h1,generated:128x256s4c2x1w2g8,cublaslt:h0,cublaslt:h2,cublaslt:h3,cublaslt:h4";
  const auto choices = parse_mlp_choices(text);
  ASSERT_TRUE(choices) << choices.error().message;
  EXPECT_EQ(choices_text(*choices), text);
  const auto kernels = part_kernels(*choices);
  ASSERT_EQ(kernels.size(), spec_of(Op::kMlp).parts.size());
  for (size_t i = 0; i < kernels.size(); ++i) {
    EXPECT_EQ(kernels[i].part, spec_of(Op::kMlp).parts[i]);
  }
  EXPECT_EQ(kernels[3].config, "h2");
  EXPECT_FALSE(parse_mlp_choices(text.substr(0, text.rfind(','))));
  EXPECT_FALSE(parse_mlp_choices(""));
  EXPECT_FALSE(parse_mlp_choices(f8::format("{},cublaslt:h1", text)));
}

}  // namespace
}  // namespace f8::tuner
