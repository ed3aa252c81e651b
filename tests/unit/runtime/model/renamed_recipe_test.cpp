// A recipe's name is for people: the five named recipes under other names have the same rows of the
// table, kernels, traffic between ranks and verdicts; and a name alone gives none of them.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/gemm/choose.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "runtime/model/model_plan.hpp"

namespace f8::runtime {
namespace {

constexpr Shape kMeasured = {8192, 4096, 4096};

class RenamedRecipe : public ::testing::TestWithParam<Recipe> {
 protected:
  [[nodiscard]] std::vector<ConvertedLinear> verdicts(const Recipe& recipe, FilterPolicy policy,
                                                      tuning_db::Parallelism ranks = {}) const {
    ModelOptions options;
    options.recipe = recipe;
    options.tokens = kMeasured.m;
    options.filter.names = {std::string(kAutoFlag)};
    options.filter.policy = policy;
    options.parallel = ranks;
    std::vector<ModelLinear> linears;
    for (const char* name : {"layers.0.attention.wq", "layers.0.attention.wo"}) {
      linears.push_back({name, kMeasured.k, kMeasured.n, {}});
    }
    auto all = filter_model(linears, options, &table_);
    EXPECT_TRUE(all) << (all ? "" : all.error().message);
    return all ? *std::move(all) : std::vector<ConvertedLinear>{};
  }
  static void expect_same(const std::vector<ConvertedLinear>& a,
                          const std::vector<ConvertedLinear>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].convert, b[i].convert);
      EXPECT_EQ(a[i].reason, b[i].reason);
      EXPECT_EQ(a[i].evidence, b[i].evidence);
      EXPECT_EQ(a[i].speedup, b[i].speedup);
      ASSERT_EQ(a[i].wire.has_value(), b[i].wire.has_value());
      if (!a[i].wire) continue;
      EXPECT_EQ(a[i].wire->fp8_us, b[i].wire->fp8_us);
      EXPECT_EQ(a[i].wire->fp8_exposed_us, b[i].wire->fp8_exposed_us);
    }
  }

  // A row of each recipe's linear and of each of its fp8 GEMMs.
  static TuningTable measured() {
    TuningTable table;
    table.devices = {{.name = "NVIDIA H100 80GB HBM3", .cc = 90, .sm_count = 132}};
    table.sources = {{"built-in"}};
    for (const Recipe& recipe : builtin_recipes()) {
      table.add({recipe.name, kMeasured, 1.5, 1.49, 1.51, 1e6});
      const LinearDesc desc = {.shape = kMeasured, .recipe = recipe, .choices = {}};
      const LinearKernels kernels = linear_kernels(desc).value();
      for (const Gemm gemm : kGemms) {
        if (!recipe.at(gemm).is_fp8()) continue;
        const GemmChoice any =
            choose_gemm(nullptr, *kernels.gemms[static_cast<size_t>(gemm)], 132).value();
        table.add({Problem::make(to_op(gemm), recipe, kMeasured).value(),
                   {.config = any.otherwise.value_or(any.config)},
                   1000});
      }
    }
    return parse_table(table.serialize()).value();
  }

  TuningTable table_ = measured();
  Recipe named_ = GetParam();
  Recipe renamed_ = {"mine", named_.gemms};
};

TEST_P(RenamedRecipe, HasTheKeysOfItsSettings) {
  EXPECT_EQ(settings_label(renamed_), named_.name);
  for (const Op op : {Op::kOutput, Op::kGradInput, Op::kGradWeight, Op::kLinear}) {
    EXPECT_EQ(Problem::make(op, renamed_, kMeasured)->key(),
              Problem::make(op, named_, kMeasured)->key());
  }
}

TEST_P(RenamedRecipe, HasTheSameRowsAndKernels) {
  const LinearDesc named = {.shape = kMeasured, .recipe = named_, .choices = {}};
  const LinearDesc renamed = {.shape = kMeasured, .recipe = renamed_, .choices = {}};
  const LinearKernels a = linear_kernels(named).value();
  const LinearKernels b = linear_kernels(renamed).value();
  for (size_t i = 0; i < a.gemms.size(); ++i) {
    const GemmChoice one = choose_gemm(&table_, *a.gemms[i], 132).value();
    const GemmChoice other = choose_gemm(&table_, *b.gemms[i], 132).value();
    EXPECT_EQ(one.provider, other.provider);
    EXPECT_EQ(config_text(one), config_text(other));
    EXPECT_EQ(one.why, other.why);
    if (!named_.gemms[i].is_fp8()) continue;
    EXPECT_EQ(other.why, "the tuning table's row of this shape");
  }
  const auto keys = [&](const LinearDesc& desc) {
    std::vector<std::string> all;
    const std::vector<codegen::KernelSpec> specs = choose_kernels(desc, &table_, 132)->specs();
    for (const codegen::KernelSpec& spec : specs) all.push_back(codegen::key(spec));
    return all;
  };
  EXPECT_EQ(keys(named), keys(renamed));
}

TEST_P(RenamedRecipe, HasTheSameVerdictsAndTraffic) {
  const auto alone = verdicts(renamed_, FilterPolicy::kMeasured);
  ASSERT_FALSE(alone.empty());
  EXPECT_EQ(alone.front().evidence, Evidence::kMeasured);
  expect_same(verdicts(named_, FilterPolicy::kMeasured), alone);
  // The parts of two tensor-parallel ranks are no measured shapes.
  const tuning_db::Parallelism fsdp = {.fsdp = 8};
  const auto sharded = verdicts(renamed_, FilterPolicy::kMeasured, fsdp);
  EXPECT_TRUE(sharded.front().wire.has_value());
  expect_same(verdicts(named_, FilterPolicy::kMeasured, fsdp), sharded);
  if (torchao_boxes(named_).empty()) return;
  expect_same(verdicts(named_, FilterPolicy::kTorchao), verdicts(renamed_, FilterPolicy::kTorchao));
}

TEST_P(RenamedRecipe, OpensAFilterFileOfItsSettings) {
  ModelOptions options;
  options.recipe = renamed_;
  options.tokens = 64;
  options.filter.verdicts = FilterFile{
      .recipe = named_.name, .tokens = 64, .decisions = {{"w", 64, 64, true, "measured"}}};
  const ModelLinear linear = {"w", 64, 64, {}};
  const auto all = filter_model({&linear, 1}, options, nullptr);
  ASSERT_TRUE(all) << all.error().message;
  EXPECT_EQ(all->front().reason, "by the filter file: measured");
}

TEST_P(RenamedRecipe, ANameAloneDecidesNothing) {
  Recipe other = named_;
  other.gemms[0] = {.a = {.pow2 = true}, .b = {}, .fast = false};
  EXPECT_TRUE(settings_label(other).starts_with("custom_")) << settings_label(other);
  EXPECT_TRUE(is_recipe_name(settings_label(other)));
  const auto unknown = verdicts(other, FilterPolicy::kMeasured);
  ASSERT_FALSE(unknown.empty());
  EXPECT_FALSE(unknown.front().convert);
  EXPECT_NE(unknown.front().reason.find("no measurements"), std::string::npos);
}

// Version 0.1 labelled rows and filter files of a recipe of the caller's own by its name.
class OldLabel : public ::testing::Test {
 protected:
  // A recipe with no named recipe's settings.
  static Recipe own(std::string name) {
    Recipe recipe{std::move(name), find_recipe("rowwise")->gemms};
    recipe.gemms[0].fast = false;
    return recipe;
  }
  static ModelOptions options(const Recipe& recipe) {
    ModelOptions all;
    all.recipe = recipe;
    all.tokens = kMeasured.m;
    return all;
  }
  static Result<ConvertedLinear> decide(const ModelOptions& all, const TuningTable* table) {
    const ModelLinear linear = {"w", kMeasured.k, kMeasured.n, {}};
    auto linears = F8_TRY(filter_model({&linear, 1}, all, table));
    return std::move(linears.front());
  }
};

TEST_F(OldLabel, OfARowIsTheCallersRecipeOfThatName) {
  TuningTable written;
  written.devices = {{.name = "NVIDIA H100 80GB HBM3", .cc = 90, .sm_count = 132}};
  written.sources = {{"mine.f8db"}};
  written.add({"mine", kMeasured, 1.5, 1.49, 1.51, 1e6});
  written.add({"rowwise", kMeasured, 1.25, 1.24, 1.26, 1e6});
  const TuningTable table = parse_table(written.serialize()).value();
  const auto speedup_of = [&](const Recipe& recipe) {
    ModelOptions all = options(recipe);
    all.filter.names = {std::string(kAutoFlag)};
    const Result<ConvertedLinear> decided = decide(all, &table);
    EXPECT_TRUE(decided) << decided.error().message;
    EXPECT_EQ(decided->evidence, decided->convert ? Evidence::kMeasured : Evidence::kRule);
    return decided->speedup.speedup;
  };
  EXPECT_EQ(speedup_of(own("mine")), 1.5);
  EXPECT_EQ(speedup_of(own("other")), 1);
  EXPECT_EQ(speedup_of(own("rowwise")), 1);  // a named recipe's rows are of its settings
  // The row of the settings goes first.
  EXPECT_EQ(speedup_of({"mine", find_recipe("rowwise")->gemms}), 1.25);
  EXPECT_EQ(speedup_of({"mine", find_recipe("blockwise")->gemms}), 1.5);
}

TEST_F(OldLabel, OfAFilterFileIsTheCallersRecipeOfThatName) {
  const auto open = [](const std::string& label, const Recipe& recipe) {
    ModelOptions all = options(recipe);
    all.filter.verdicts = FilterFile{.recipe = label,
                                     .tokens = kMeasured.m,
                                     .decisions = {{"w", kMeasured.k, kMeasured.n, true, "so"}}};
    return decide(all, nullptr);
  };
  EXPECT_TRUE(open("mine", own("mine")));
  EXPECT_TRUE(open("mine", {"mine", find_recipe("rowwise")->gemms}));
  EXPECT_TRUE(open("rowwise", {"mine", find_recipe("rowwise")->gemms}));
  const auto refused = open("mine", own("other"));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(refused.error().message.find("for recipe mine"), std::string::npos);
  EXPECT_NE(refused.error().message.find("other (with settings of its own)"), std::string::npos);
  const auto renamed = open("rowwise", own("rowwise"));
  ASSERT_FALSE(renamed);
  EXPECT_NE(renamed.error().message.find("rowwise (with settings of its own)"), std::string::npos);
}

// In high precision nothing of a recipe is left but the types.
TEST_F(OldLabel, OfARowInHighPrecisionMayBeAny) {
  TuningTable table;
  const Problem row = Problem::parse(
                          "output/rowwise_with_gw_hp/bf16.bf16.bf16/tn/"
                          "m8192n4096k4096/b0f0")
                          .value();
  table.add({row, {Provider::kCublasLt, {}, 7}, 1000});
  const LinearDesc desc = {.shape = kMeasured, .recipe = bf16_recipe(), .choices = {}};
  const GemmChoice chosen = choose_gemm(&table, *linear_kernels(desc)->gemms[0], 132).value();
  EXPECT_EQ(chosen.provider, Provider::kCublasLt);
  EXPECT_EQ(chosen.heuristic, 7);
}

INSTANTIATE_TEST_SUITE_P(All, RenamedRecipe, ::testing::ValuesIn(builtin_recipes()),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace f8::runtime
