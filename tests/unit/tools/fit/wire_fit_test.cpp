// The fit of the wire's constants: known ones are found again, and what rows cannot tell is said.
#include "tools/tuner/fit/wire_fit.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace f8::tuner {
namespace {

using tuning_db::Collective;
using tuning_db::RankGroup;
using tuning_db::WireModel;

WireModel true_wire() {
  WireModel m;
  m.launch_us = 12;
  m.nvlink = {.step_us = 2.5, .gb_per_s = 310};
  m.network = {.step_us = 9, .gb_per_s = 42};
  return m;
}

// Rows of the true model, with noise of so much that repeats in each run.
std::vector<WireRow> rows_of(const std::vector<RankGroup>& groups, double noise = 0) {
  std::vector<WireRow> rows;
  for (const RankGroup group : groups) {
    for (double bytes = 4096; bytes < 1e9; bytes *= 4) {
      const double wave = std::sin(static_cast<double>(7 * rows.size()));
      rows.push_back({Collective::kAllGather, group, bytes,
                      true_wire().us(Collective::kAllGather, group, bytes) * (1 + noise * wave)});
    }
    rows.push_back(
        {Collective::kAllReduce, group, 4096, true_wire().us(Collective::kAllReduce, group, 4096)});
  }
  return rows;
}

void expect_refused(const std::vector<WireRow>& rows, std::string_view words) {
  const auto fit = fit_wire(rows, WireModel::fitted());
  ASSERT_FALSE(fit) << words;
  EXPECT_NE(fit.error().message.find(words), std::string::npos) << fit.error().message;
}

TEST(WireFit, FindsTheConstantsOfSyntheticRows) {
  const WireFit fit =
      fit_wire(rows_of({{2, 1}, {4, 1}, {8, 1}, {2, 2}, {4, 4}}), WireModel::fitted()).value();
  EXPECT_NEAR(fit.model.launch_us, 12, 1e-6);
  EXPECT_NEAR(fit.model.nvlink.step_us, 2.5, 1e-6);
  EXPECT_NEAR(fit.model.nvlink.gb_per_s, 310, 1e-6);
  EXPECT_NEAR(fit.model.network.step_us, 9, 1e-6);
  EXPECT_NEAR(fit.model.network.gb_per_s, 42, 1e-6);
  EXPECT_TRUE(fit.kept.empty());
  EXPECT_LT(fit.left_out.worst, 1e-9);
  EXPECT_TRUE(fit.model.is_measured({4, 4}));
  EXPECT_FALSE(fit.model.is_measured({16, 2}));
}

TEST(WireFit, KeepsWhatOneGroupCannotTell) {
  const WireModel& start = WireModel::fitted();
  const WireFit fit = fit_wire(rows_of({{2, 1}}), start).value();
  EXPECT_EQ(fit.model.nvlink.step_us, start.nvlink.step_us);
  EXPECT_EQ(fit.model.network.gb_per_s, start.network.gb_per_s);
  EXPECT_EQ(fit.kept.size(), 2U);
  // Launch and step together are right for two ranks.
  EXPECT_NEAR(fit.model.launch_us + fit.model.nvlink.step_us, 14.5, 0.5);
  EXPECT_NEAR(fit.model.nvlink.gb_per_s, 310, 10);
}

TEST(WireFit, TheErrorIsThatOfRowsLeftOut) {
  const WireFit fit = fit_wire(rows_of({{2, 1}, {4, 1}, {8, 1}}, 0.1), WireModel::fitted()).value();
  EXPECT_GT(fit.left_out.rms, fit.fitted.rms);
  EXPECT_GT(fit.left_out.worst, fit.left_out.rms);
  EXPECT_NEAR(fit.left_out.rms, 0.07, 0.03);
  EXPECT_EQ(fit.model.error, fit.left_out.rms);
  EXPECT_NEAR(fit.model.nvlink.gb_per_s, 310, 31);
}

TEST(WireFit, TooFewOrTooAlikeIsAnError) {
  std::vector<WireRow> few = rows_of({{2, 1}});
  few.resize(5);
  expect_refused(few, "5 rows of one host");
  few = rows_of({{2, 1}});
  few.resize(6);
  expect_refused(few, "with one row left out: 5 rows of one host");
  expect_refused(rows_of({{2, 2}}), "0 rows of one host");
  std::vector<WireRow> alike;
  for (int i = 0; i < 9; ++i) alike.push_back({Collective::kAllGather, {2, 1}, 4096, 12});
  expect_refused(alike, "do not tell bandwidth from latency");
  std::vector<WireRow> one_of_network = rows_of({{2, 1}});
  one_of_network.push_back({Collective::kAllGather, {2, 2}, 1e6, 100});
  expect_refused(one_of_network, "the 1 rows of several hosts");
}

TEST(WireRows, AreReadByTheNamesOfTheirColumns) {
  const auto rows = parse_wire_rows(
      "collective,dtype,ranks,hosts,bytes,us,low\n"
      "all_reduce,float32,8,2,4096,31.5,30\n\n"
      "reduce_scatter,bfloat16,2,1,1e6,20,19\r\n");
  ASSERT_TRUE(rows) << rows.error().message;
  ASSERT_EQ(rows->size(), 2U);
  EXPECT_EQ((*rows)[0].collective, Collective::kAllReduce);
  EXPECT_EQ((*rows)[0].group, (RankGroup{8, 2}));
  EXPECT_EQ((*rows)[0].bytes, 4096);
  EXPECT_EQ((*rows)[0].us, 31.5);
  EXPECT_EQ((*rows)[1].bytes, 1e6);
  const auto least = parse_wire_rows("us,bytes,ranks\n20,4096,2\n");
  ASSERT_TRUE(least) << least.error().message;
  EXPECT_EQ((*least)[0].collective, Collective::kAllGather);
  EXPECT_EQ((*least)[0].group, (RankGroup{2, 1}));
}

TEST(WireRows, AnErrorNamesLineAndColumn) {
  const auto refused = [](std::string_view csv, std::string_view words) {
    const auto rows = parse_wire_rows(csv);
    ASSERT_FALSE(rows) << words;
    EXPECT_NE(rows.error().message.find(words), std::string::npos) << rows.error().message;
  };
  refused("ranks,us\n", "line 1: no column bytes");
  refused("ranks,bytes,us\n2,4096,0\n", "line 2: column us is '0'");
  refused("ranks,bytes,us\n2,4096,nan\n", "line 2: column us is 'nan'");
  refused("ranks,bytes,us\n1,4096,5\n", "line 2: column ranks is '1'");
  refused("ranks,bytes,us\n2,40.5,5\n", "column bytes is '40.5'");
  refused("ranks,bytes,us\n2,4096\n", "line 2: column us is ''");
  refused("ranks,bytes,us,collective\n2,4096,5,gather\n", "column collective is 'gather'");
  refused("ranks,bytes,us,hosts\n4,4096,5,3\n", "line 2: 3 hosts");
  refused("ranks,bytes,us,hosts\n4,4096,5,8\n", "column hosts is '8'");
}

TEST(WireFit, WritesTheConstantsAsSource) {
  WireModel m = true_wire();
  m.cast_gb_per_s = 2780;
  m.error = 0.0834;
  m.measured = {{2, 1}, {8, 2}};
  m.source = "a test";
  m.date = "2026-11-23";
  const std::string source = wire_constants_source(m);
  for (const char* line :
       {".launch_us = 12,", ".nvlink = {.step_us = 2.5, .gb_per_s = 310},",
        ".network = {.step_us = 9, .gb_per_s = 42},", ".cast_gb_per_s = 2780,", ".error = 0.0834,",
        ".measured = {{2, 1}, {8, 2}},", ".source = \"a test\",", ".date = \"2026-11-23\"};"}) {
    EXPECT_NE(source.find(line), std::string::npos) << line << "\n" << source;
  }
}

}  // namespace
}  // namespace f8::tuner
