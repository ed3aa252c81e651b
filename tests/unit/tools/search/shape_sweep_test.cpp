#include "tools/tuner/search/bench/shape_sweep.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>

#include "base/file.hpp"

namespace f8::tuner {
namespace {

TEST(ShapeTable, ColumnsAreFoundByName) {
  const auto shapes = parse_shape_table(
      "provider,m,k,n,us\r\n"
      "\"a\",8192,4096,1024,7.5\r\n"
      "b,2048,64,32,1\n"
      "\n"
      "c,8192,4096,1024,8\n");
  ASSERT_TRUE(shapes) << shapes.error().message;
  EXPECT_EQ(*shapes, (std::vector<Shape>{{8192, 1024, 4096}, {2048, 32, 64}}));
}

TEST(ShapeTable, WhatIsNoneIsSaidWithItsLine) {
  const auto message = [](std::string_view text) {
    const auto shapes = parse_shape_table(text);
    return shapes ? std::string() : shapes.error().message;
  };
  constexpr const char* kNoShapes =
      "no shapes below the line of names; add some, such as 8192,4096,4096";
  EXPECT_EQ(message(""), kNoShapes);
  EXPECT_EQ(message("m,n,k\n"), kNoShapes);
  EXPECT_TRUE(message("m,n\n1,16\n").starts_with("line 1: no column k;"));
  EXPECT_TRUE(message("8192,4096,4096\n").starts_with("line 1: no column m;"));
  EXPECT_EQ(message("m,n,k\n16,16,16\n16,16\n"), "line 3: column k is '', no whole number");
  EXPECT_EQ(message("m,n,k\n16,16.5,16\n"), "line 2: column n is '16.5', no whole number");
  EXPECT_TRUE(message("m,n,k\n16,16,17\n").starts_with("line 2: k"))
      << message("m,n,k\n16,16,17\n");
  EXPECT_TRUE(message("m,n,k\n0,16,16\n").starts_with("line 2: m"));
}

TEST(ShapeSweep, SumsUpRatios) {
  const std::vector<ShapeRatio> ratios = {{"a", 1.1}, {"b", 0.94}, {"c", 1.0}, {"d", 0.95}};
  const ShapeSummary summary = summarize(ratios);
  EXPECT_EQ(summary.count, 4);
  EXPECT_NEAR(summary.geometric_mean, std::pow(1.1 * 0.94 * 0.95, 0.25), 1e-12);
  EXPECT_EQ(summary.worst, 0.94);
  EXPECT_EQ(summary.worst_of, "b");
  EXPECT_EQ(summary.at_least_100, 2);
  EXPECT_EQ(summary.at_least_095, 3);
  EXPECT_EQ(summarize({}).count, 0);
  EXPECT_EQ(summarize({}).geometric_mean, 0);
}

TEST(ShapeSweep, SumsUpSlowdowns) {
  const std::vector<ShapeRatio> ratios = {{"a", 1.1}, {"b", 1.0}, {"c", 1.02}};
  const ShapeSlowdown s = slowdown(ratios);
  EXPECT_EQ(s.median, 1.02);
  EXPECT_NEAR(s.p95, 1.092, 1e-12);
  EXPECT_EQ(s.worst, 1.1);
  EXPECT_EQ(s.worst_of, "a");
}

TEST(CsvFile, QuotesWhatItMustAndIsThereAtOnce) {
  const fs::path folder = make_temp_directory(fs::temp_directory_path(), "shape-sweep").value();
  constexpr std::array<std::string_view, 3> kColumns = {"a", "b", "c"};
  auto file = CsvFile::create(folder / "t.csv", kColumns);
  ASSERT_TRUE(file) << file.error().message;
  ASSERT_TRUE(file->add(std::array<std::string, 3>{"", "x,y", "say \"no\""}));
  EXPECT_EQ(read_file(folder / "t.csv").value(), "a,b,c\n,\"x,y\",\"say \"\"no\"\"\"\n");
  EXPECT_FALSE(file->add(std::array<std::string, 1>{"one"}));
  EXPECT_FALSE(CsvFile::create(folder / "nowhere" / "t.csv", kColumns));
  EXPECT_TRUE(CsvFile().add(std::array<std::string, 1>{"one"})) << "none was asked for";
  {  // what standard output held before stays
    const Descriptor target(::open((folder / "out").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_EQ(::write(target.get(), "head\n", 5), 5);
    const Descriptor before(::dup(STDOUT_FILENO));
    ASSERT_EQ(::dup2(target.get(), STDOUT_FILENO), STDOUT_FILENO);
    auto streamed = CsvFile::create("-", kColumns);
    ::dup2(before.get(), STDOUT_FILENO);
    ASSERT_TRUE(streamed) << streamed.error().message;
    ASSERT_TRUE(streamed->add(std::array<std::string, 3>{"1", "2", "3"}));
  }
  EXPECT_EQ(read_file(folder / "out").value(), "head\na,b,c\n1,2,3\n");
  std::error_code ignored;
  fs::remove_all(folder, ignored);
}

}  // namespace
}  // namespace f8::tuner
