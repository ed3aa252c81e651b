// report: the page, its SVG files, what it takes and what it refuses.
#include <gtest/gtest.h>

#include <set>

#include "base/file.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

constexpr size_t kMaxPageBytes = 2'000'000;  // of the built-in measurements

size_t count(std::string_view text, std::string_view part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

std::set<std::string> files_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

TEST(Report, IsOnePageWithoutTheNetwork) {
  const Tool tool;
  const Outcome outcome = tool({"report"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err, "wrote report.html\n");
  const std::string page = read_file(tool.path() / "report.html").value();
  EXPECT_LT(page.size(), kMaxPageBytes);
  EXPECT_EQ(count(page, "http://") + count(page, "https://"), 0u);
  EXPECT_EQ(count(page, "url(") + count(page, "@import") + count(page, " src="), 0u);
  EXPECT_GE(count(page, "role=\"img\""), 40u);
  for (const char* part :
       {"Speedup of linears", "torchao&#39;s rule", "Roofline of rowwise",
        "Generated against cuBLASLt", "Where a linear's time goes", "Regret of the cost model",
        "inside their interval", "NVIDIA H100 80GB HBM3"}) {
    EXPECT_TRUE(contains(page, part)) << part;
  }
  EXPECT_EQ(files_in(tool.path()), (std::set<std::string>{"report.html"}));
}

TEST(Report, WritesItsFiguresAsFilesToo) {
  const Tool tool;
  const Json result = tool.json({"report", "-o", "a.html", "--svg", "figures", "--quiet"});
  EXPECT_EQ(result["output"], "a.html");
  const std::string page = read_file(tool.path() / "a.html").value();
  EXPECT_EQ(result["bytes"], page.size());
  std::set<std::string> named;
  for (const Json& figure : result["figures"]) {
    EXPECT_TRUE(contains(page, " id=\"" + figure["name"].get<std::string>() + "\""));
    if (!figure.contains("svg")) continue;
    const fs::path file = figure["svg"].get<std::string>();
    named.insert(file.filename().string());
    const std::string svg = read_file(tool.path() / file).value();
    EXPECT_TRUE(svg.starts_with("<svg xmlns=")) << file;
    const std::string style = svg.substr(0, svg.find("</style>"));
    EXPECT_FALSE(contains(style, "var(")) << "few programs but browsers know variables";
    EXPECT_TRUE(contains(style, "svg.figure text { fill: #1a1d21; }")) << style;
    EXPECT_TRUE(contains(style, "svg.figure text { fill: #e9ecef; }")) << style;
    // The drawing is the page's, byte for byte.
    const std::string body = svg.substr(svg.find("</style>") + 8);
    EXPECT_TRUE(contains(page, body.substr(0, body.size() - 1))) << file;
  }
  EXPECT_GE(named.size(), 40u);
  EXPECT_EQ(files_in(tool.path() / "figures"), named);
  EXPECT_EQ(files_in(tool.path()), (std::set<std::string>{"a.html", "figures"}));
  // Equal data gives equal bytes, and what else lies in the folder stays.
  tool.write("figures/mine.txt", "mine");
  EXPECT_EQ(tool({"report", "--quiet", "-o", "-", "--svg", "figures/"}).out, page);
  named.insert("mine.txt");
  EXPECT_EQ(files_in(tool.path() / "figures"), named);
}

TEST(Report, HasTheDecisionOfFilter) {
  const Tool tool;
  const Words model = {"--model", "llama3-8b", "--tokens", "2048", "--recipe", "rowwise"};
  Words filter = {"filter"};
  filter.insert(filter.end(), model.begin(), model.end());
  const Json decisions = tool.json(filter)["decisions"];
  Words report = {"report", "-o", "-"};
  report.insert(report.end(), model.begin(), model.end());
  const std::string page = tool(report).out;
  std::set<std::string> reasons;
  for (const Json& decision : decisions) reasons.insert(decision["reason"].get<std::string>());
  EXPECT_GE(reasons.size(), 3u);
  for (std::string reason : reasons) {
    for (size_t at = 0; (at = reason.find('>', at)) != std::string::npos; ++at) {
      reason.replace(at, 1, "&gt;");
    }
    EXPECT_TRUE(contains(page, reason)) << reason;
  }
  // A row's cells are below their heads.
  EXPECT_TRUE(contains(page,
                       "<th scope=\"col\">layer</th><th scope=\"col\">verdict</th>"
                       "<th scope=\"col\">speedup</th><th scope=\"col\">interval</th>"
                       "<th scope=\"col\">count</th><th scope=\"col\">M</th>"
                       "<th scope=\"col\">N</th>"
                       "<th scope=\"col\">K</th>"));
  const Json& wk = decisions[1];
  EXPECT_EQ(wk["fqn"], "layers.0.attention.wk");
  EXPECT_TRUE(contains(
      page,
      f8::format("<th scope=\"row\">layers.*.attention.wk</th><td>{}</td><td>{:.3f}</td>"
                 "<td>[{:.3f}, {:.3f}]</td><td>32</td><td>2048</td><td>1024</td><td>4096</td>",
                 wk["convert"].get<bool>() ? "float8" : "keep bf16", wk["speedup"].get<double>(),
                 wk["speedup_lo"].get<double>(), wk["speedup_hi"].get<double>())));
  EXPECT_TRUE(contains(page, "llama3-8b: which layers to convert"));
  EXPECT_TRUE(contains(page, "<option value=\"rowwise\" selected=\"selected\">"));
}

TEST(Report, EscapesTheNamesOfLayers) {
  const Tool tool;
  tool.write("<b>&model.json",
             R"([{"fqn": "<img src=x onerror=alert(1)>", "in_features": 4096, "out_features": 1024},
                 {"fqn": "a\"'&]]>\uffff", "in_features": 4096, "out_features": 4096}])");
  const Outcome outcome = tool({"report", "-o", "-", "--model", "<b>&model.json", "--tokens",
                                "8192", "--recipe", "rowwise"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_FALSE(contains(outcome.out, "<img"));
  EXPECT_TRUE(contains(outcome.out, "&lt;img src=x onerror=alert(1)&gt;"));
  EXPECT_TRUE(contains(outcome.out, "a&quot;&#39;&amp;]]&gt;\\xef\\xbf\\xbf"));
  EXPECT_TRUE(contains(outcome.out, "&lt;b&gt;&amp;model.json: which layers"));
}

TEST(Report, AUsersDatabaseIsBeforeTheBuiltInOne) {
  const Tool tool;
  {
    auto mine =
        tuning_db::Database::open(tool.path() / "mine.db", tuning_db::OpenMode::kCreate).value();
    tuning_db::sweep_linears(
        mine, "rowwise", {{777, 1024, 4096}, {777, 4096, 4096}}, [](Shape) { return 1e6; },
        [](Shape) { return 1.77; });
  }
  const Json result = tool.json({"report", "--db", "mine.db", "-o", "a.html", "--quiet"});
  const std::string page = read_file(tool.path() / "a.html").value();
  EXPECT_TRUE(contains(page, "Speedup at M 777: rowwise"));
  EXPECT_TRUE(contains(page, "Speedup at M 8192: rowwise")) << "the built-in rows are behind";
  EXPECT_TRUE(contains(page, "<option value=\"rowwise\" selected=\"selected\">")) << "its recipe";
  EXPECT_TRUE(contains(page, "mine.db"));
  EXPECT_FALSE(contains(page, tool.path().string())) << "no folder of the user's is named";
}

TEST(Report, RefusesWhatHasNothingToShow) {
  const Tool tool;
  {
    using tuning_db::Database;
    using tuning_db::OpenMode;
    EXPECT_TRUE(Database::open(tool.path() / "empty.db", OpenMode::kCreate).has_value());
    auto gemms = Database::open(tool.path() / "gemms.db", OpenMode::kCreate).value();
    tuning_db::sweep(gemms,
                     {{tuning_db::gemm(64, 64, 64), tuning_db::generated("128x256s4c2x1w2g8")}},
                     [](const auto&) { return tuning_db::timed(1000); });
  }
  tool.write("none.db", "");
  tool.expect_refused(1, {"report", "--db", "empty.db"}, {"--db: empty.db is empty", "sweep"});
  tool.expect_refused(1, {"report", "--db", "gemms.db"},
                      {"--db: gemms.db has no measured linear", "sweep"});
  tool.expect_refused(1, {"report", "--db", "none.db"}, {"none.db"});
  tool.expect_refused(1, {"report", "--db", "gone.db"}, {"gone.db"});
}

TEST(Report, RefusesOptionsThatDoNotFit) {
  const Tool tool;
  tool.expect_refused(
      1, {"report", "--model", "no-such-model", "--tokens", "8", "--recipe", "rowwise"},
      {"--model", "no-such-model"});
  tool.expect_refused(1, {"report", "--model", "llama3-8b", "--recipe", "rowwise"}, {"--tokens"});
  tool.expect_refused(1, {"report", "--model", "llama3-8b", "--tokens", "8"}, {"--recipe"});
  tool.expect_refused(1, {"report", "--tokens", "8"}, {"--model"});
  tool.expect_refused(1, {"report", "--recipe", "rowwise"}, {"--model"});
  tool.expect_refused(1, {"report", "-o", "-", "--json"}, {"-o", "--json"});
  tool.expect_refused(1, {"report", "--svg", "-"}, {"--svg"});
}

TEST(Report, LeavesNothingWhereItCannotWrite) {
  const Tool tool;
  tool.write("file", "");
  fs::create_directory(tool.path() / "folder");
  tool.expect_refused(1, {"report", "-o", "folder"}, {"-o", "folder", "directory"});
  tool.expect_refused(1, {"report", "--quiet", "-o", "-", "--svg", "file/figures"},
                      {"--svg", "file"});
  // The figures are ready when the page fails: they do not appear.
  tool.expect_refused(1, {"report", "-o", "gone/a.html", "--svg", "figures"}, {"-o", "gone"});
  tool.write("old.html", "old");
  tool.expect_refused(1, {"report", "-o", "old.html", "--svg", "file"},
                      {"--svg", "file", "no directory"});
  EXPECT_EQ(read_file(tool.path() / "old.html").value(), "old");
}

}  // namespace
}  // namespace f8::testing
