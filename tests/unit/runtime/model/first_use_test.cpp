#include "runtime/model/first_use.hpp"

#include <float8/float8.hpp>
#include <fstream>
#include <thread>

#include "base/file.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/gemm/choose.hpp"
#include "runtime/model/info.hpp"
#include "runtime/model/model_plan.hpp"
#include "tests/golden.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

constexpr Shape kLinearShape = {512, 80, 64};

// Linears of an emulated device; fake_tune.sh is float8-tune.
class FirstUse : public ::testing::Test {
 protected:
  FirstUse() {
    folder_ = make_temp_directory(fs::temp_directory_path(), "first_use_").value();
    set_log_sink([this](LogLevel level, std::string_view text) {
      if (level == LogLevel::kWarning) warnings_.emplace_back(text);
    });
  }
  ~FirstUse() override {
    set_log_sink({});
    fs::remove_all(folder_);
  }

  [[nodiscard]] fs::path file(const char* ending = "") const {
    return folder_ / (std::string("t.f8db") + ending);
  }
  static void write(const fs::path& path, std::string_view text) {
    ASSERT_TRUE(write_file_atomic(path, text));
  }
  [[nodiscard]] std::vector<std::string> calls() const {
    std::ifstream in(file(".calls"));
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  }
  [[nodiscard]] size_t sweeps() const {
    return static_cast<size_t>(std::ranges::count_if(
        calls(), [](const std::string& call) { return call.starts_with("sweep "); }));
  }

  [[nodiscard]] std::shared_ptr<Context> context(int milliseconds = 1000) const {
    ContextOptions options;
    options.emulate = true;
    options.tune_on_first_use = milliseconds;
    options.database = file();
    return Context::create(0, options).value();
  }

  // A table of a device of this context that has measured the linear, with a kernel of its own.
  [[nodiscard]] static std::string table(const Context& context, Shape shape = kLinearShape) {
    TuningTable table;
    table.devices = {context.device()};
    table.sources = {{"t.f8db"}};
    table.add(LinearSpeedup{.recipe = "rowwise",
                            .shape = shape,
                            .speedup = 1.5,
                            .lo = 1.4,
                            .hi = 1.6,
                            .bf16_ns = 1000});
    const Recipe recipe = find_recipe("rowwise").value();
    const GemmDesc gemm = {
        .gemm = Gemm::kOutput, .shape = shape, .scale = codegen::ScaleMode::kAxis, .fast = true};
    GemmChoice choice = choose_gemm(nullptr, gemm, 132).value();
    table.add(KernelChoice{Problem::make(Op::kOutput, recipe, shape).value(), choice, 1000});
    return table.serialize();
  }

  [[nodiscard]] static std::string why(const std::shared_ptr<Context>& context,
                                       Shape shape = kLinearShape, const char* recipe = "rowwise") {
    const LinearDesc desc = testing::describe(recipe, shape);
    tune_first_use(*context, desc.recipe, shape);
    return Linear::plan(context, desc).value()->choice(Gemm::kOutput).why;
  }

  fs::path folder_;
  std::vector<std::string> warnings_;
};

TEST_F(FirstUse, AShapeIsMeasuredBeforeItIsPlanned) {
  const auto first = context();
  write(file(".measured"), table(*first));
  EXPECT_EQ(why(first), "the tuning table's row of this shape");
  EXPECT_EQ(calls(), (std::vector<std::string>{
                         "sweep --mnk 512,80,64 --recipe rowwise --device 0 --budget 1.000s --db " +
                             file().string() + " --quiet",
                         "db export --format table --db " + file().string() + " -o -"}));
  EXPECT_TRUE(warnings_.empty());
  EXPECT_NE(describe(*first).find("1 of 1 shapes measured"), std::string::npos);
  // The same shape, and one whose M is near.
  EXPECT_EQ(why(first), "the tuning table's row of this shape");
  (void)why(first, {1024, 80, 64});
  EXPECT_EQ(sweeps(), 1U);
  (void)why(first, {2048, 80, 64});
  EXPECT_EQ(sweeps(), 2U);
}

TEST_F(FirstUse, LaterProcessesReadTheDatabase) {
  const auto later = context();
  write(file(), table(*later));
  EXPECT_EQ(why(later), "the tuning table's row of this shape");
  EXPECT_EQ(sweeps(), 0U);
  EXPECT_EQ(calls().size(), 1U);
}

TEST_F(FirstUse, WhatFailsIsAWarningAndTriedOnce) {
  const auto context = this->context();
  write(file(".status"), "2");
  EXPECT_TRUE(why(context).starts_with("by the cost model"));
  EXPECT_TRUE(why(context).starts_with("by the cost model"));
  EXPECT_EQ(sweeps(), 1U);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("rowwise m512n80k64"), std::string::npos) << warnings_[0];
  EXPECT_NE(warnings_[0].find("ended with status 2: no device of this number"), std::string::npos)
      << warnings_[0];
  EXPECT_NE(describe(*context).find("0 of 1 shapes measured; rowwise m512n80k64"),
            std::string::npos);
}

TEST_F(FirstUse, ASpentBudgetKeepsWhatThereIs) {
  const auto context = this->context();
  write(file(".status"), "4");
  EXPECT_TRUE(why(context).starts_with("by the cost model"));
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("not measured in the time that there was"), std::string::npos);
}

TEST_F(FirstUse, ADamagedTableLeavesTheContextsOwn) {
  const auto context = this->context();
  const std::string before = context->table()->hash();
  write(file(), "float8-table 3\nsomething\n");
  (void)why(context);
  EXPECT_EQ(context->table()->hash(), before);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("line"), std::string::npos) << warnings_[0];
}

TEST_F(FirstUse, OtherRecipesAndContextsAreLeftAlone) {
  const auto context = this->context();
  LinearDesc custom = testing::describe("rowwise", kLinearShape);
  custom.recipe.gemms[0].fast = false;
  tune_first_use(*context, custom.recipe, kLinearShape);
  tune_first_use(*context, find_recipe("rowwise").value(), {512, 81, 64});  // no shape
  (void)why(this->context(0));
  EXPECT_TRUE(calls().empty());
}

TEST_F(FirstUse, APlanStartsNoProcess) {
  const auto context = this->context();
  write(file(".measured"), table(*context));
  const auto linear = Linear::plan(context, testing::describe("rowwise", kLinearShape)).value();
  EXPECT_TRUE(linear->choice(Gemm::kOutput).why.starts_with("by the cost model"));
  EXPECT_TRUE(calls().empty());
}

TEST_F(FirstUse, TheCInterfaceMeasuresBeforeItPlans) {
  float8::ContextOptions options;
  options.emulate = true;
  options.tune_on_first_use = 1000;
  options.database = file();
  const auto context = float8::Context::create(0, options).value();
  write(file(".measured"), table(*this->context()));
  float8::LinearDesc desc;
  desc.m_max = kLinearShape.m;
  desc.n = kLinearShape.n;
  desc.k = kLinearShape.k;
  desc.recipe = float8::Recipe::rowwise();
  const std::string info = float8::Linear::plan(context, desc).value().info().value();
  EXPECT_NE(info.find("the tuning table's row of this shape"), std::string::npos) << info;
  EXPECT_EQ(sweeps(), 1U);
}

TEST_F(FirstUse, ACallbackTakesThePlaceOfTheProgram) {
  ContextOptions options;
  options.emulate = true;
  options.tune_on_first_use = 1000;
  options.database = file();
  std::vector<Shape> asked;
  options.measure = [&](Context& context, const Recipe&, Shape shape) -> Status {
    asked.push_back(shape);
    if (shape != kLinearShape) return fail(ErrorCode::kUnsupported, "not this one");
    context.set_table(TuningTable::parse(table(context)).value());
    return {};
  };
  const auto context = Context::create(0, options).value();
  const Shape other = {4096, 80, 64};
  EXPECT_EQ(why(context), "the tuning table's row of this shape");
  EXPECT_TRUE(why(context, other).starts_with("by the cost model"));
  (void)why(context, other);
  EXPECT_EQ(asked, (std::vector<Shape>{kLinearShape, other}));
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("rowwise m4096n80k64: not this one"), std::string::npos);
  EXPECT_TRUE(calls().empty());
}

TEST_F(FirstUse, ThreadsMeasureOnce) {
  const auto context = this->context();
  write(file(".measured"), table(*context));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { (void)why(context); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sweeps(), 1U);
}

TEST_F(FirstUse, ContextsOfOneHostTakeTurns) {
  const auto a = context();
  const auto b = context();
  write(file(".measured"), table(*a));
  std::thread other([&] { (void)why(a); });
  (void)why(b);
  other.join();
  EXPECT_EQ(sweeps(), 1U);
  EXPECT_EQ(a->table()->hash(), b->table()->hash());
}

TEST_F(FirstUse, AModelsLayersAreMeasuredBeforeTheVerdicts) {
  const auto context = this->context();
  write(file(".measured"), table(*context));
  ModelOptions options;
  options.recipe = find_recipe("rowwise").value();
  options.tokens = 512;
  options.filter.names = {"head", "auto_filter_small_kn"};
  const std::vector<ModelLinear> linears = {
      {.name = "up", .in_features = 64, .out_features = 80},
      {.name = "head", .in_features = 64, .out_features = 160}};
  const ModelPlan plan = plan_model(context, linears, options).value();
  EXPECT_TRUE(plan.linears[0].convert) << plan.linears[0].reason;
  EXPECT_EQ(plan.linears[0].evidence, Evidence::kMeasured) << plan.linears[0].reason;
  EXPECT_EQ(sweeps(), 1U);
}

TEST_F(FirstUse, TheCInterfaceChecksTheOptions) {
  float8::ContextOptions options;
  options.emulate = true;
  options.tune_on_first_use = -1;
  EXPECT_MESSAGE(float8::Context::create(0, options), "tune_on_first_use", "-1");
  options.tune_on_first_use = 10;
  EXPECT_MESSAGE(float8::Context::create(0, options), "FLOAT8_DB");
  options.database = file();
  EXPECT_TRUE(float8::Context::create(0, options));
}

}  // namespace
}  // namespace f8::runtime
