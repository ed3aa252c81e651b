// What the figures say, on databases and tables of known numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/unit/report/occurrences.hpp"
#include "tests/unit/tuning_db/sample.hpp"
#include "tools/float8-tune/report/figures/kernels.hpp"
#include "tools/float8-tune/report/figures/model_quality.hpp"
#include "tools/float8-tune/report/figures/page.hpp"
#include "tools/float8-tune/report/figures/speedups.hpp"
#include "tools/tuner/search/gemm_candidates.hpp"

namespace f8::report {
namespace {

namespace db = tuning_db;

// A table of linears of one recipe on one device, with these speedups.
TuningTable table_with(const std::string& recipe, const std::vector<Shape>& shapes,
                       const std::function<double(Shape)>& speedup, int power_limit_w = 700) {
  TuningTable table;
  table.devices = {db::h100(power_limit_w)};
  table.sources = {{"my.db"}};
  for (const Shape& s : shapes) {
    const double value = speedup(s);
    const double bf16_ns = 10'000 + static_cast<double>(s.m) * static_cast<double>(s.n) *
                                        static_cast<double>(s.k) * 1e-5;
    table.add(LinearSpeedup{.recipe = recipe,
                            .shape = s,
                            .speedup = value,
                            .lo = value - 0.005,
                            .hi = value + 0.005,
                            .bf16_ns = bf16_ns});
  }
  return table;
}

std::vector<Shape> square(std::vector<int64_t> sizes, int64_t m) {
  std::vector<Shape> shapes;
  for (const int64_t n : sizes) {
    for (const int64_t k : sizes) shapes.push_back({m, n, k});
  }
  return shapes;
}

double small_loses(Shape s) {
  return s.n == 1024 && s.k == 1024 ? 0.9 : 1.3;
}

Measurements of(TuningTable table) {
  Measurements measurements;
  measurements.table = std::move(table);
  return measurements;
}

// How many lines of a style a figure has, which are one path.
size_t lines_of(const Figure& figure, std::string_view style) {
  const size_t end = figure.body.find(f8::format("\" class=\"{}\"", style));
  if (end == std::string::npos) return 0;
  const size_t begin = figure.body.rfind("d=\"", end);
  return occurrences(figure.body.substr(begin, end - begin), "M");
}

TEST(Speedups, AGridHasItsRowsAndTorchaosRule) {
  const Measurements measurements =
      of(table_with("rowwise", square({1024, 4096, 16384}, 8192), small_loses));
  const auto grids = speedup_grids(measurements);
  ASSERT_EQ(grids.size(), 1u);
  const SpeedupGrid& grid = grids.front();
  EXPECT_EQ(grid.m, 8192);
  EXPECT_EQ(grid.ks, (std::vector<int64_t>{1024, 4096, 16384}));
  for (size_t n = 0; n < 3; ++n) {
    for (size_t k = 0; k < 3; ++k) {
      const SpeedupCell& cell = grid.cells[n][k];
      const Shape shape{8192, grid.ns[n], grid.ks[k]};
      EXPECT_TRUE(cell.is_known);
      EXPECT_EQ(cell.evidence, Evidence::kMeasured);
      EXPECT_DOUBLE_EQ(cell.speedup.speedup, small_loses(shape));
      EXPECT_EQ(cell.converts, small_loses(shape) > 1);
      EXPECT_NE(cell.torchao_keeps,
                torchao_verdict(recipe_of_label("rowwise"), {"", shape.k, shape.n}).convert);
    }
  }
}

TEST(Speedups, TheMapDrawsTheLineOfOneAndTorchaosRule) {
  const Measurements measurements =
      of(table_with("rowwise", square({1024, 4096}, 8192), small_loses));
  const Figure map = speedup_map(measurements, speedup_grids(measurements).front());
  // The one slow cell has two neighbours; the line is in the legend once more.
  EXPECT_EQ(lines_of(map, "line-one"), 2u + 1u);
  // torchao keeps all but K = N = 4096.
  EXPECT_EQ(lines_of(map, "line-rule"), 2u + 1u);
  EXPECT_EQ(occurrences(map.body, ">0.90<"), 1u);
  EXPECT_EQ(occurrences(map.body, ">1.30<"), 3u);
  EXPECT_EQ(map.table.rows.size(), 4u);
  const Measurements delayed = of(table_with("delayed", square({1024, 4096}, 8192), small_loses));
  const Figure without = speedup_map(delayed, speedup_grids(delayed).front());
  EXPECT_EQ(occurrences(without.body, "line-rule"), 0u);
  EXPECT_NE(without.description.find("torchao has no rule"), std::string::npos);
}

TEST(Speedups, WhatWasNotMeasuredIsMarkedAsAnEstimate) {
  std::vector<Shape> shapes = square({1024, 4096, 16384}, 8192);
  std::erase(shapes, Shape{8192, 4096, 4096});
  const Measurements measurements = of(table_with("rowwise", shapes, small_loses));
  const SpeedupGrid grid = speedup_grids(measurements).front();
  EXPECT_EQ(grid.cells[1][1].evidence, Evidence::kInterpolated);
  EXPECT_EQ(occurrences(speedup_map(measurements, grid).body, ">~"), 1u);
}

TEST(Speedups, AWideGridKeepsTheSizesWithMostRows) {
  std::vector<Shape> shapes;
  for (int64_t i = 1; i <= 40; ++i) {
    shapes.push_back({64, 1024, 16 * i});
    if (i > 10) shapes.push_back({64, 2048, 16 * i});  // these have two rows
  }
  const Measurements measurements = of(table_with("rowwise", shapes, [](Shape) { return 1.1; }));
  const SpeedupGrid grid = speedup_grids(measurements).front();
  EXPECT_TRUE(grid.is_cut);
  ASSERT_EQ(grid.ks.size(), kMaxAxis);
  EXPECT_EQ(grid.ks.front(), 16 * 11);
}

TEST(Speedups, ClassesOfOneNameHaveTheirOwnGrids) {
  TuningTable table = table_with("rowwise", square({1024, 4096}, 8192), [](Shape) { return 1.5; });
  table.add_behind(table_with(
      "rowwise", square({1024, 4096}, 8192), [](Shape) { return 1.2; }, 500));
  const Measurements measurements = of(std::move(table));
  const auto grids = speedup_grids(measurements);
  ASSERT_EQ(grids.size(), 2u);
  EXPECT_DOUBLE_EQ(grids[0].cells[0][0].speedup.speedup, 1.5);
  EXPECT_DOUBLE_EQ(grids[1].cells[0][0].speedup.speedup, 1.2);
  EXPECT_EQ(measurements.device_label(1), "NVIDIA H100 80GB HBM3, 500 W");
}

class Collected : public ::testing::Test {
 protected:
  static constexpr const char* kConfig = "128x256s4c2x1w2g8";
  static constexpr const char* kOther = "128x128s4c1x1w2g8";

  static db::TrialKey gemm_trial(Gemm gemm, db::Candidate candidate) {
    const Problem problem =
        Problem::make(to_op(gemm), find_recipe("tensorwise").value(), kShape).value();
    return {problem, std::move(candidate)};
  }
  // Every GEMM takes 100, 200 and 300 us by the kernels that the linear names, 90 by another one.
  static void sweep_gemms(db::Database& database, double factor, const db::Toolchain& tools) {
    std::vector<db::TrialKey> trials;
    for (const Gemm gemm : kGemms) {
      trials.push_back(gemm_trial(gemm, db::generated(kConfig)));
      trials.push_back(gemm_trial(gemm, db::generated(kOther)));
      trials.push_back(gemm_trial(gemm, db::heuristic(2)));
    }
    db::sweep(
        database, trials,
        [factor](const db::TrialKey& key) {
          const double own = 100'000.0 * (1 + static_cast<double>(key.problem.op));
          if (key.candidate.impl == db::Impl::kCublasLt) return db::timed(2 * own * factor);
          const bool chosen = key.candidate.config.find(kConfig) != std::string::npos;
          return db::timed(chosen ? own * factor : 90'000 * factor);
        },
        db::h100(), tools);
  }
  static void sweep_linear(db::Database& database, double speedup, const db::Toolchain& tools) {
    db::sweep(
        database,
        {{db::linear(kShape), {db::Impl::kFloat8, "{}", "ff"}},
         {db::linear(kShape), {db::Impl::kBf16, "{}", ""}}},
        [speedup](const db::TrialKey& key) {
          if (key.candidate.impl == db::Impl::kBf16) return db::timed(1'400'000);
          db::TrialResult result = db::timed(1'400'000 / speedup, speedup);
          for (const std::string_view part : spec_of(Op::kLinear).parts) {
            result.kernels.push_back({std::string(part), Provider::kGenerated, kConfig});
          }
          return result;
        },
        db::h100(), tools);
  }
  static Measurements collected(const std::vector<NamedDatabase>& databases) {
    TuningTable table;
    for (const NamedDatabase& named : databases) table.add_behind(named.database->table().value());
    return collect(databases, std::move(table)).value();
  }
  [[nodiscard]] db::Database create(const char* name) const {
    return db::Database::open(folder_ / name, db::OpenMode::kCreate).value();
  }

  static constexpr Shape kShape{8192, 4096, 4096};
  db::TempFolder folder_;
};

TEST_F(Collected, ALinearsTimeIsThatOfItsKernelsAndARest) {
  db::Database database = create("a.db");
  sweep_gemms(database, 1, db::toolchain());
  sweep_linear(database, 2, db::toolchain());
  const Measurements measurements = collected({{"a.db", &database}});
  ASSERT_EQ(measurements.linears.size(), 1u);
  const LinearTimes& linear = measurements.linears.front();
  EXPECT_DOUBLE_EQ(linear.fp8.ns, 700'000);
  EXPECT_EQ(linear.fp8.gemm_ns[0], 100'000);
  EXPECT_EQ(linear.fp8.gemm_ns[1], 200'000);
  EXPECT_EQ(linear.fp8.gemm_ns[2], 300'000);
  EXPECT_EQ(linear.fp8.rest_ns(), 100'000);
  EXPECT_EQ(linear.bf16.rest_ns(), std::nullopt) << "no bf16 GEMM was measured";
  EXPECT_FALSE(time_by_part(measurements, 0, "tensorwise", 8192));
}

TEST_F(Collected, KernelsAreComparedWithinTheToolchainMeasuredLast) {
  db::Database database = create("a.db");
  sweep_gemms(database, 0.1, db::toolchain("older00"));
  sweep_gemms(database, 1, db::toolchain("newer00"));
  sweep_linear(database, 2, db::toolchain("newer00"));
  const Measurements measurements = collected({{"a.db", &database}});
  ASSERT_EQ(measurements.gemms.size(), 3u);
  for (const GemmTimes& gemm : measurements.gemms) {
    EXPECT_DOUBLE_EQ(gemm.generated->ns, 90'000);
    EXPECT_GE(gemm.library->ns, 200'000);
    EXPECT_EQ(gemm.library->name, "cublaslt:h2");
  }
  const auto figure = generated_against_library(measurements, 0, "tensorwise", 8192);
  ASSERT_TRUE(figure);
  EXPECT_EQ(occurrences(figure->body, ">2.22<"), 1u) << "200 over 90 us";
  EXPECT_EQ(figure->table.rows.size(), 3u);
  EXPECT_EQ(measurements.campaigns.size(), 2u);
}

TEST_F(Collected, TheFirstDatabaseAnswers) {
  db::Database mine = create("mine.db");
  sweep_gemms(mine, 1, db::toolchain());
  sweep_linear(mine, 2, db::toolchain());
  db::Database theirs = create("theirs.db");
  sweep_gemms(theirs, 0.5, db::toolchain());
  sweep_linear(theirs, 1.5, db::toolchain());
  const Measurements measurements = collected({{"mine.db", &mine}, {"theirs.db", &theirs}});
  ASSERT_EQ(measurements.linears.size(), 1u);
  EXPECT_DOUBLE_EQ(measurements.linears.front().fp8.ns, 700'000);
  for (const GemmTimes& gemm : measurements.gemms) EXPECT_DOUBLE_EQ(gemm.generated->ns, 90'000);
  EXPECT_EQ(measurements.campaigns.size(), 2u) << "both are in the provenance";
  EXPECT_EQ(measurements.methods.size(), 1u);
}

TEST(Roofline, TheRoofsOfAnH100) {
  const auto roofs = roofs_of(db::h100(), 1830);
  ASSERT_TRUE(roofs);
  EXPECT_NEAR(roofs->fp8_flops / 1e12, 1979, 1);
  EXPECT_NEAR(roofs->bf16_flops / 1e12, 989.5, 1);
  EXPECT_NEAR(roofs->bytes / 1e9, 3352, 1);
  DeviceClass unknown = db::h100();
  unknown.cc = 100;
  EXPECT_FALSE(roofs_of(unknown, 1830));
}

TEST(Roofline, Bf16OperandsAreTwiceTheBytes) {
  const Problem gemm = db::gemm(1024, 512, 256);
  EXPECT_DOUBLE_EQ(bytes_of(gemm, false), 1024 * 256 + 512 * 256 + 2 * 1024 * 512);
  EXPECT_DOUBLE_EQ(bytes_of(gemm, true), 2 * (1024 * 256 + 512 * 256 + 1024 * 512));
}

TEST(ModelQuality, RegretIsWhatTheChoiceCostsMore) {
  const Problem problem = db::gemm(8192, 4096, 4096);
  tuner::MeasuredGemm gemm{.problem = problem.key(),
                           .family = tuner::gemm_spec(problem).value(),
                           .shape = problem.shape(),
                           .linear = problem.shape(),
                           .sm_count = 132,
                           .timed = {}};
  for (const GemmConfig& config : codegen::gemm_candidates(gemm.family)) {
    codegen::GemmSpec spec = gemm.family;
    spec.config = config;
    gemm.timed.push_back({config, runtime::predicted_clocks(spec, gemm.shape, 132)});
  }
  const auto best = std::ranges::min_element(gemm.timed, {}, &tuner::TimedConfig::ns);
  gemm.library = {{"h0", best->ns / 2}};
  tuner::MeasuredGemm slower = gemm;  // the choice takes a quarter more than another one
  slower.library.clear();
  for (tuner::TimedConfig& timed : slower.timed) {
    timed.ns = timed.config == best->config ? 125 : 100;
  }
  const ChoiceRegrets regrets = choice_regrets({slower, gemm});
  ASSERT_EQ(regrets.generated.size(), 2u);
  EXPECT_NEAR(regrets.generated[0], 0, 1e-9);
  EXPECT_NEAR(regrets.generated[1], 0.25, 1e-9);
  ASSERT_EQ(regrets.any.size(), 1u);
  EXPECT_NEAR(regrets.any[0], 1, 1e-9);
}

TEST(Page, NamesOfDevicesAreEscaped) {
  TuningTable table = table_with("rowwise", square({1024, 4096}, 8192), small_loses);
  table.devices[0].name = "<script>alert(1)</script> & \"co\"";
  const Measurements measurements = of(std::move(table));
  Page page{.version = "1", .figures = all_figures(measurements), .model = {}, .recipe = {}};
  const std::string html = page_html(page, measurements);
  EXPECT_EQ(occurrences(html, "<script>"), 1u) << "its own";
  EXPECT_GT(occurrences(html, "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &quot;co&quot;"), 1u);
}

TEST(Page, OpensWithRowwiseAtManyTokensOfTheBuiltInRows) {
  TuningTable table = table_with("rowwise", square({1024, 4096}, 8192), small_loses);
  const TuningTable others =
      table_with("tensorwise", square({1024, 2048, 4096}, 64), [](Shape) { return 1.1; });
  for (const LinearSpeedup& row : others.speedups()) table.add(row);
  const auto chosen = [&](const std::string& source) {
    table.sources = {{source}};
    const Measurements measurements = of(table);
    const Page page{
        .version = "1", .figures = all_figures(measurements), .model = {}, .recipe = {}};
    return page_html(page, measurements);
  };
  const std::string builtin = chosen("built-in");
  EXPECT_EQ(occurrences(builtin, "<option value=\"rowwise\" selected=\"selected\">"), 1u);
  EXPECT_EQ(occurrences(builtin, "<option value=\"8192\" selected=\"selected\">"), 1u);
  // Of the user's rows most are of another recipe, which has none at 8192.
  const std::string own = chosen("my.db");
  EXPECT_EQ(occurrences(own, "<option value=\"tensorwise\" selected=\"selected\">"), 1u);
  EXPECT_EQ(occurrences(own, "<option value=\"8192\" selected=\"selected\">"), 0u);
}

TEST(Page, FewRowsGiveAPageWithoutTheFiguresThatTheyDoNotAllow) {
  const Measurements measurements =
      of(table_with("my_recipe", {{64, 1024, 1024}}, [](Shape) { return 1.1; }));
  const std::vector<Figure> figures = all_figures(measurements);
  ASSERT_EQ(figures.size(), 1u);
  EXPECT_EQ(figures.front().kind, "speedup");
  Page page{.version = "1", .figures = figures, .model = {}, .recipe = {}};
  EXPECT_NE(page_html(page, measurements).find("my_recipe"), std::string::npos);
}

}  // namespace
}  // namespace f8::report
