// query --map: the heat map of speedups over N and K.
#include <gtest/gtest.h>

#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

Words map_of(const std::string& mnk, const std::string& recipe = "rowwise") {
  return {"query", "--map", "--mnk", mnk, "--recipe", recipe};
}

TEST(QueryMap, DigitsWithoutEscapesInAPipe) {
  const Tool tool;
  const Outcome map = tool(map_of("8192,1024:4096:x2,4096:8192:x2"));
  EXPECT_EQ(map.code, 0);
  EXPECT_TRUE(
      map.out.starts_with("speedup of a linear against bf16, forward + backward: m=8192, "
                          "rowwise, NVIDIA H100 80GB HBM3\n"
                          "   N \\ K    4096    8192\n"
                          "    1024   1."))
      << map.out;
  EXPECT_TRUE(contains(map.out, "\n    2048 ")) << "every N is a line";
  EXPECT_TRUE(contains(map.out, "~\n")) << "2048 x 8192 is interpolated";
  EXPECT_TRUE(map.out.ends_with("~ interpolated, ? modelled, - unknown\n"));
  EXPECT_EQ(map.out.find('\x1b'), std::string::npos);
}

TEST(QueryMap, ColoursAreTheVerdictWhereTheyAreAllowed) {
  const Tool tool;
  Words words = map_of("8192,4096,4096");
  words.insert(words.end(), {"--color", "always"});
  const Outcome map = tool(words);
  EXPECT_TRUE(contains(map.out, "\x1b[32m  1.")) << map.out;
  EXPECT_TRUE(contains(map.out, "green converts"));
}

TEST(QueryMap, TheJsonIsWhatTheFilterEstimates) {
  const Tool tool;
  Words words = map_of("8192,1024:4096:x4,4096:4160:64");
  const Json map = tool.json(words);
  EXPECT_EQ(map["m"], 8192);
  EXPECT_EQ(map["recipe"], "rowwise");
  ASSERT_EQ(map["results"].size(), 4U);
  for (const Json& cell : map["results"]) {
    const std::string shape =
        "8192," + std::to_string(cell["n"].get<int>()) + "," + std::to_string(cell["k"].get<int>());
    const Json explained = tool.json({"explain", shape, "--recipe", "rowwise"});
    for (const char* field : {"speedup", "speedup_lo", "speedup_hi", "evidence"}) {
      EXPECT_EQ(cell[field], explained[field]) << shape << " " << field;
    }
  }
  EXPECT_EQ(map["results"][0]["evidence"], "measured");
}

TEST(QueryMap, BadInput) {
  const Tool tool;
  tool.expect_refused(1, map_of("1024:8192:x2,1024,1024"), {"--mnk", "one M", "1024", "2048"});
  tool.expect_refused(1, map_of("16,16:16384:16,16:16384:16"), {"--mnk"});
  tool.expect_refused(1, map_of("16,16:1024:16,16:1024:16"), {"--mnk", "64 x 64"});
  tool.expect_refused(1, map_of("8192,1024,1024", "fp8"), {"--recipe"});
}

}  // namespace
}  // namespace f8::testing
