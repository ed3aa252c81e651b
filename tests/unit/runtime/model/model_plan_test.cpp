// A model's linears filtered and planned on the emulated device.
#include "runtime/model/model_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "runtime/model/info.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::says;

ModelOptions options_of(const char* recipe, std::vector<std::string> names = {},
                        FilterPolicy policy = FilterPolicy::kMeasured) {
  ModelOptions options;
  options.recipe = find_recipe(recipe).value();
  options.tokens = 64;
  options.filter.names = std::move(names);
  options.filter.policy = policy;
  return options;
}

ModelLinear layer(std::string name, int64_t k, int64_t n, LinearDesc desc = {}) {
  return {std::move(name), k, n, std::move(desc)};
}

std::vector<ModelLinear> small_model() {
  return {layer("layers.0.wq", 64, 64), layer("layers.0.w1", 64, 128), layer("layers.1.wq", 64, 64),
          layer("layers.1.w1", 64, 128), layer("output", 64, 272)};
}

ConvertedLinear decide(const ModelOptions& options, const ModelLinear& linear,
                       const TuningTable* table = nullptr) {
  const auto all = filter_model(std::span(&linear, 1), options, table);
  EXPECT_TRUE(all) << (all ? "" : all.error().message);
  return all ? all->at(0) : ConvertedLinear{};
}

class ModelPlanTest : public ::testing::Test {
 protected:
  void refused(std::span<const ModelLinear> linears, const ModelOptions& options,
               std::string_view words) const {
    const auto model = plan_model(context_, linears, options);
    ASSERT_FALSE(model) << words;
    EXPECT_EQ(model.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(model.error(), words)) << model.error().message;
  }
  std::shared_ptr<Context> context_ = Context::create(0, {.emulate = true}).value();
};

// --- which are converted

TEST(FilterModel, NamesAndSizesWithoutTheFlag) {
  const ModelOptions options = options_of("rowwise", {"output", "wk"});
  EXPECT_TRUE(decide(options, layer("layers.0.wq", 16, 16)).convert);
  EXPECT_TRUE(decide(options, layer("Output", 16, 16)).convert) << "names have their case";
  const ConvertedLinear named = decide(options, layer("my.output.proj", 4096, 4096));
  EXPECT_FALSE(named.convert);
  EXPECT_NE(named.reason.find("\"output\""), std::string::npos);
  EXPECT_NE(decide(options, layer("w", 24, 16)).reason.find("K (in_features) 24"),
            std::string::npos);
  EXPECT_NE(decide(options, layer("w", 16, 40)).reason.find("N (out_features) 40"),
            std::string::npos);
}

TEST(FilterModel, TheFlagSwitchesTorchaosRuleOn) {
  const ModelLinear small = layer("w", 1024, 28672);
  const ModelLinear large = layer("w", 4096, 14336);
  for (const bool flag : {false, true}) {
    const ModelOptions options = options_of(
        "rowwise",
        flag ? std::vector<std::string>{"auto_filter_small_kn"} : std::vector<std::string>{},
        FilterPolicy::kTorchao);
    EXPECT_EQ(decide(options, small).convert, !flag);
    EXPECT_TRUE(decide(options, large).convert);
  }
  // Names come first, whatever the rule would say.
  const ConvertedLinear kept =
      decide(options_of("rowwise", {"auto_filter_small_kn", "w"}, FilterPolicy::kTorchao), large);
  EXPECT_FALSE(kept.convert);
  EXPECT_NE(kept.reason.find("its name holds"), std::string::npos);
  const auto no_rule = filter_model(
      {}, options_of("blockwise", {"auto_filter_small_kn"}, FilterPolicy::kTorchao), nullptr);
  ASSERT_FALSE(no_rule);
  EXPECT_TRUE(says(no_rule.error(), "torchao has no auto_filter_small_kn rule"));
}

// A table of one device; the estimator itself has its tests in tests/unit/tuning_db/estimate.
TuningTable measured_table() {
  TuningTable table;
  table.devices = {{.name = "NVIDIA H100 80GB HBM3", .cc = 90, .power_limit_w = 700}};
  table.sources = {{"built-in"}};
  table.add({"rowwise", {8192, 4096, 4096}, 1.3, 1.25, 1.35, 2e6, 0, 0, "2026-11-22"});
  table.add({"rowwise", {8192, 1024, 4096}, 0.9, 0.85, 0.95, 1e6});
  table.add({"rowwise", {8192, 2048, 4096}, 1.05, 1.01, 1.1, 1e6});
  table.add({"rowwise", {2048, 4096, 4096}, 1.1, 1.09, 1.11, 5e5});
  return table;
}

TEST(FilterModel, TheTablesSpeedupDecides) {
  const TuningTable table = measured_table();
  ModelOptions options = options_of("rowwise", {"auto_filter_small_kn"});
  options.tokens = 8192;
  const ConvertedLinear fast = decide(options, layer("a", 4096, 4096), &table);
  EXPECT_TRUE(fast.convert);
  EXPECT_EQ(fast.evidence, Evidence::kMeasured);
  EXPECT_EQ(fast.speedup, (SpeedupInterval{1.3, 1.25, 1.35}));
  EXPECT_EQ(fast.reason,
            "converted: at least 1.250, need > 1.02; measured, bf16 2000.0 us, float8 1538.5 us");
  const ConvertedLinear slow = decide(options, layer("b", 4096, 1024), &table);
  EXPECT_FALSE(slow.convert);
  EXPECT_NE(slow.reason.find("at most 0.950, need > 1.02"), std::string::npos);
  EXPECT_NE(decide(options, layer("c", 4096, 2048), &table).reason.find("ambiguous"),
            std::string::npos);
  options.filter.margin = 0.005;
  EXPECT_TRUE(decide(options, layer("c", 4096, 2048), &table).convert);
}

TEST(FilterModel, ALayerIsJudgedByItsOwnTokens) {
  const TuningTable table = measured_table();
  ModelOptions options = options_of("rowwise", {"auto_filter_small_kn"});
  options.tokens = 8192;
  ModelLinear expert = layer("experts.0.w1", 4096, 4096);
  expert.tokens = 2048;
  EXPECT_EQ(decide(options, expert, &table).speedup, (SpeedupInterval{1.1, 1.09, 1.11}));
  expert.tokens = -1;
  const auto refused = filter_model(std::span(&expert, 1), options, &table);
  ASSERT_FALSE(refused);
  EXPECT_TRUE(says(refused.error(), "layer 'experts.0.w1': -1 tokens")) << refused.error().message;
}

// The experts of a layer have one verdict, of both expert linears, and no plan.
TEST_F(ModelPlanTest, ExpertsHaveAVerdictAndNoPlan) {
  TuningTable table = measured_table();
  const auto add = [&](Shape shape, double speedup, double bf16_ns) {
    table.add(LinearSpeedup{.recipe = "rowwise",
                            .shape = shape,
                            .speedup = speedup,
                            .lo = speedup,
                            .hi = speedup,
                            .bf16_ns = bf16_ns,
                            .groups = {.experts = 8}});
  };
  add({8192, 512, 512}, 1.5, 3e6);
  add({8192, 512, 256}, 1.2, 1.2e6);
  ModelLinear experts = layer("moe.experts", 512, 256);
  experts.tokens = 8192;
  experts.groups = {.experts = 8};
  ModelOptions options = options_of("rowwise", {"auto_filter_small_kn"});
  const ConvertedLinear fast = decide(options, experts, &table);
  EXPECT_TRUE(fast.convert) << fast.reason;
  EXPECT_EQ(fast.evidence, Evidence::kMeasured);
  EXPECT_NEAR(fast.speedup.speedup, 4.2 / 3, 1e-4);
  experts.groups.experts = 16;
  EXPECT_FALSE(decide(options, experts, &table).convert) << "nobody measured 16";
  const std::vector<ModelLinear> both = {experts, layer("wq", 64, 64)};
  const auto plan = plan_model(context_, both, options_of("rowwise"));
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_TRUE(plan->linears[0].convert);
  EXPECT_EQ(plan->linears[0].plan, nullptr);
  EXPECT_NE(plan->linears[1].plan, nullptr);
  EXPECT_EQ(plan->converted, 2U);
  experts.groups.experts = 2000;
  refused(std::span(&experts, 1), options, "at most 1024");
}

// A neighbour's interval is no interval of this shape: it is widened.
TEST(FilterModel, BetweenMeasuredShapesTheIntervalIsWider) {
  const TuningTable table = measured_table();
  ModelOptions options = options_of("rowwise", {"auto_filter_small_kn"});
  options.tokens = 4096;
  const ConvertedLinear between = decide(options, layer("d", 4096, 4096), &table);
  EXPECT_EQ(between.evidence, Evidence::kInterpolated);
  EXPECT_NEAR(between.speedup.speedup, std::sqrt(1.3 * 1.1), 1e-3);
  EXPECT_LT(between.speedup.lo, std::sqrt(1.25 * 1.09) - 0.01);
  EXPECT_NE(between.reason.find("interpolated between M 2048 (1.100)"), std::string::npos);
  // Four rows are too few for a model of other shapes.
  const ConvertedLinear far = decide(options, layer("e", 28672, 28672), &table);
  EXPECT_FALSE(far.convert);
  EXPECT_EQ(far.evidence, Evidence::kRule);
  EXPECT_NE(far.reason.find("too few"), std::string::npos) << far.reason;
}

TEST(FilterModel, WithoutATableLayersAreKept) {
  for (const char* recipe : {"rowwise", "blockwise"}) {
    const ConvertedLinear kept =
        decide(options_of(recipe, {"auto_filter_small_kn"}), layer("w", 8192, 8192));
    EXPECT_FALSE(kept.convert);
    EXPECT_NE(kept.reason.find("there are no measurements of recipe"), std::string::npos);
    EXPECT_NE(kept.reason.find("float8-tune sweep --mnk 64,8192,8192"), std::string::npos);
  }
}

// The estimate is there, whatever decides.
TEST(FilterModel, WithoutTheRuleTheSpeedupIsStillSaid) {
  const TuningTable table = measured_table();
  ModelOptions options = options_of("rowwise");
  options.tokens = 8192;
  const ConvertedLinear slow = decide(options, layer("b", 4096, 1024), &table);
  EXPECT_TRUE(slow.convert);
  EXPECT_EQ(slow.evidence, Evidence::kRule);
  EXPECT_EQ(slow.speedup, (SpeedupInterval{0.9, 0.85, 0.95}));
}

// A new context has a table, of the nearest class of device, unless it is told to have none.
TEST(FilterModel, AContextHasTheBuiltInTable) {
  const auto with = Context::create(0, {.emulate = true}).value();
  ASSERT_NE(with->table(), nullptr);
  EXPECT_GT(with->table()->speedups().size(), 100U);
  EXPECT_NE(describe(*with).find(" (built-in)"), std::string::npos) << describe(*with);
  const auto without = Context::create(0, {.builtin_table = false, .emulate = true}).value();
  EXPECT_EQ(without->table(), nullptr);
  with->set_table(TuningTable{});
  EXPECT_NE(describe(*with).find("(loaded)"), std::string::npos) << describe(*with);
}

TEST(FilterModel, TheCallbackIsAskedWhatNamesAndSizesLeave) {
  ModelOptions options = options_of("tensorwise", {"output"});
  std::vector<std::string> asked;
  options.filter.callback = [&](const ModelLinear& linear) {
    asked.push_back(linear.name);
    return linear.out_features < 128;
  };
  auto model = small_model();
  model.push_back(layer("odd", 20, 16));
  const auto all = filter_model(model, options, nullptr).value();
  EXPECT_EQ(asked,
            (std::vector<std::string>{"layers.0.wq", "layers.0.w1", "layers.1.wq", "layers.1.w1"}));
  std::vector<bool> converted;
  for (const ConvertedLinear& linear : all) converted.push_back(linear.convert);
  EXPECT_EQ(converted, (std::vector<bool>{true, false, true, false, false, false}));
  EXPECT_NE(all[1].reason.find("callback"), std::string::npos);
}

// --- a filter file

FilterFile verdicts() {
  FilterFile file{.recipe = "tensorwise", .tokens = 64, .decisions = {}};
  file.decisions = {
      {"layers.*.wq", 64, 64, true, "measured", Evidence::kInterpolated, {1.3, 1.25, 1.4}},
      {"layers.*.w1", 64, 128, false, "too small"},
      {"output", 64, 272, true, "measured"}};
  return file;
}

TEST(FilterModel, AFilterFileDecidesWhatNamesLeave) {
  ModelOptions options = options_of("tensorwise", {"output"});
  options.filter.verdicts = verdicts();
  const auto all = filter_model(small_model(), options, nullptr).value();
  std::vector<bool> converted;
  for (const ConvertedLinear& linear : all) converted.push_back(linear.convert);
  EXPECT_EQ(converted, (std::vector<bool>{true, false, true, false, false}));
  EXPECT_EQ(all[1].reason, "by the filter file: too small");
  EXPECT_EQ(all[0].evidence, Evidence::kInterpolated);
  EXPECT_EQ(all[0].speedup, (SpeedupInterval{1.3, 1.25, 1.4}));
  // The flag says that the rule is on; the file holds what it said.
  options.filter.names.emplace_back(kAutoFlag);
  const auto beside = filter_model(small_model(), options, nullptr).value();
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(beside[i].convert, all[i].convert);
    EXPECT_EQ(beside[i].reason, all[i].reason);
    EXPECT_EQ(beside[i].speedup, all[i].speedup);
  }
}

TEST_F(ModelPlanTest, AFilterFileOfSomethingElseIsRefused) {
  const auto model = small_model();
  ModelOptions options = options_of("tensorwise");
  options.filter.verdicts = verdicts();
  ASSERT_TRUE(plan_model(context_, model, options));
  ModelOptions other = options;
  other.tokens = 128;
  refused(model, other, "is for recipe tensorwise and 64 tokens");
  other = options;
  other.recipe = find_recipe("rowwise").value();
  refused(model, other, "is for recipe tensorwise");
  auto renamed = model;
  renamed[0].name = "blocks.0.wq";
  refused(renamed, options, "has no layer 'blocks.0.wq'");
  auto resized = model;
  resized[2].out_features = 80;
  refused(resized, options, "layer 'layers.1.wq' has N 80");
}

// --- the plans

TEST_F(ModelPlanTest, LayersThatAreAlikeShareAPlan) {
  auto linears = small_model();
  linears[2].desc.bias = true;
  const auto model = plan_model(context_, linears, options_of("tensorwise", {"output"})).value();
  ASSERT_EQ(model.linears.size(), 5U);
  EXPECT_EQ(model.converted, 4U);
  EXPECT_EQ(model.distinct_plans, 3U);
  EXPECT_EQ(model.linears[1].plan, model.linears[3].plan);
  EXPECT_NE(model.linears[0].plan, model.linears[2].plan);
  EXPECT_EQ(model.linears[4].plan, nullptr);
  EXPECT_TRUE(model.linears[2].plan->desc().bias);
  EXPECT_EQ(model.linears[1].plan->desc().shape, (Shape{64, 128, 64}));
  size_t most = 0;
  for (const ConvertedLinear& linear : model.linears) {
    if (linear.plan) most = std::max(most, linear.plan->workspace_bytes());
  }
  EXPECT_EQ(model.workspace_bytes, most);
  EXPECT_GT(model.kernels, 0U);
}

TEST_F(ModelPlanTest, SlotsOfDelayedScalesLieEndToEnd) {
  const auto model = plan_model(context_, small_model(), options_of("delayed", {"w1"})).value();
  size_t next = 0;
  for (const ConvertedLinear& linear : model.linears) {
    if (linear.plan == nullptr) continue;
    EXPECT_EQ(linear.first_slot, next);
    next += linear.plan->scale_slots().size();
  }
  EXPECT_EQ(model.slots.size(), next);
  EXPECT_EQ(next, 9U);
  EXPECT_TRUE(DelayedScales::plan(context_, model.slots));
}

TEST_F(ModelPlanTest, APlanRuns) {
  const auto model = plan_model(context_, small_model(), options_of("rowwise")).value();
  for (const ConvertedLinear& linear : model.linears) {
    const Shape shape = linear.plan->desc().shape;
    const auto xm = reference::random_matrix(shape.m, shape.k, 1);
    const auto wm = reference::random_matrix(shape.n, shape.k, 2);
    Buffer x(xm), w(wm), y(static_cast<size_t>(shape.m * shape.n * 2));
    Buffer workspace(model.workspace_bytes);
    ASSERT_TRUE(linear.plan->forward({.m = shape.m,
                                      .x = {x.data()},
                                      .w = {w.data()},
                                      .y = {y.data()},
                                      .workspace = {workspace.data()}},
                                     nullptr));
    const auto expected = reference::linear_gemm(find_recipe("rowwise").value(), Gemm::kOutput, xm,
                                                 wm, reference::Matrix{})
                              .value();
    EXPECT_LT(reference::relative_error(expected, y.bf16()), 2.5e-3) << linear.name;
  }
}

// On a device, what was compiled ahead is all that planning needs, and each kernel once.
TEST_F(ModelPlanTest, KernelsAreCompiledOnceAndAhead) {
  testing::FakeCuda cuda;
  const auto context = cuda.context();
  std::atomic<int> compiled = 0;
  const testing::ScratchDirectory directory;
  const auto compile = testing::FakeCuda::compiler();
  context->state().cache =
      codegen::CubinCache::open(directory.path(), [&](const codegen::KernelSource& source) {
        ++compiled;
        return compile(source);
      }).value();
  ModelOptions options = options_of("rowwise");
  options.compile_threads = 3;
  const auto model = plan_model(context, small_model(), options).value();
  EXPECT_EQ(static_cast<size_t>(compiled), model.kernels);
  EXPECT_GE(static_cast<size_t>(cuda.modules_loaded), model.kernels - 2) << "all but unused ones";
  const auto again = plan_model(context, small_model(), options).value();
  EXPECT_EQ(again.kernels, model.kernels);
  EXPECT_EQ(static_cast<size_t>(compiled), model.kernels);
}

TEST_F(ModelPlanTest, NothingToConvert) {
  const auto empty = plan_model(context_, {}, options_of("rowwise")).value();
  EXPECT_TRUE(empty.linears.empty());
  const auto kept = plan_model(context_, small_model(), options_of("rowwise", {"w", "o"})).value();
  EXPECT_EQ(kept.converted, 0U);
  EXPECT_EQ(kept.kernels, 0U);
  EXPECT_EQ(kept.workspace_bytes, 0U);
}

TEST_F(ModelPlanTest, Misuse) {
  auto linears = small_model();
  ModelOptions options = options_of("rowwise");
  options.tokens = 0;
  refused(linears, options, "tokens is 0");
  options = options_of("rowwise", {""});
  refused(linears, options, "empty name");
  options = options_of("rowwise");
  options.filter.margin = -1;
  refused(linears, options, "margin is -1");
  options = options_of("rowwise");
  options.recipe.gemms[0].a.dtype = options.recipe.gemms[0].b.dtype = Dtype::kE5m2;
  refused(linears, options, "rowwise");
  options = options_of("rowwise");
  linears[1].name = linears[0].name;
  refused(linears, options, "layer 'layers.0.wq' is listed twice");
  linears[1].name.clear();
  refused(linears, options, "has no name");
  linears = small_model();
  linears[3].in_features = 0;
  refused(linears, options, "layer layers.1.w1: in_features 0");
  linears = small_model();
  linears[2].desc.shape = {1, 16, 16};
  refused(linears, options, "layer 'layers.1.wq': its desc");
  linears = small_model();
  linears[4].desc.choices[0] = GemmChoice{{.config = {.tile_m = 7}}};
  refused(linears, options, "layer 'output': ");
  refused(linears, options, "tile_m must be");
}

}  // namespace
}  // namespace f8::runtime
