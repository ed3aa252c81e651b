// filter, thresholds, explain and query of the devices whose measurements are built in.
#include <gtest/gtest.h>

#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

class BuiltInDevices : public ::testing::Test {
 protected:
  using Json = nlohmann::json;
  using Words = std::vector<std::string>;

  Tool tool_;
};

// The built-in devices have many M of one shape each.
TEST_F(BuiltInDevices, ThresholdsNameTheirDeviceAndTheShapesBehindThem) {
  EXPECT_EQ(tool_.json({"thresholds", "--recipe", "rowwise"})["device"], "NVIDIA H100 80GB HBM3");
  const Words words = {"thresholds", "--recipe", "rowwise", "--device", "NVIDIA H200"};
  const Json result = tool_.json(words);
  EXPECT_EQ(result["device"], "NVIDIA H200");
  int64_t cells = 0;
  for (const Json& t : result["thresholds"]) {
    EXPECT_GE(t["cells"], 2) << t;
    EXPECT_LE(t["cells_kept"], t["cells"]) << t;
    EXPECT_EQ(t["cells_kept"] == 0, t["n_max"] == 0) << t;
    cells += t["cells"].get<int64_t>();
  }
  EXPECT_GT(result["m_of_one_cell"].size(), 50U);
  EXPECT_EQ(cells + static_cast<int64_t>(result["m_of_one_cell"].size()), result["cells"]);
  const std::string text = tool_(words).out;
  for (const char* part : {"shapes measured on NVIDIA H200\n", "M of one measured shape", " more\n",
                           "where a rule keeps 1, its limits are that one shape's"}) {
    EXPECT_TRUE(contains(text, part)) << part << text;
  }
  EXPECT_EQ(tool_.json({"thresholds", "--recipe", "rowwise", "--device", "H200"}), result)
      << "a part of the name";
  tool_.expect_refused(1, {"thresholds", "--recipe", "rowwise", "--device", "A100"},
                       {"--device", "'NVIDIA H200'"});
}

TEST_F(BuiltInDevices, ExplainOfADeviceByItsName) {
  const std::vector<std::string> words = {"explain", "8192,4096,14336", "--recipe", "rowwise"};
  const Json here = tool_.json(words);
  std::vector<std::string> there = words;
  there.insert(there.end(), {"--device", "NVIDIA H200"});
  const Json other = tool_.json(there);
  EXPECT_EQ(here["trials"][0]["provenance"]["device"], "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(other["interval_terms"]["device"], 0);
  EXPECT_NE(other["speedup"], here["speedup"]);
  tool_.expect_refused(1, {"explain", "8192,4096,14336", "--recipe", "rowwise", "--device", "A100"},
                       {"--device", "'NVIDIA H200'"});
}

// A shape that nobody measured has a wide interval, which is not to be read as a slower fp8.
TEST_F(BuiltInDevices, AFlipForWantOfMeasurementsSaysSo) {
  const Words words = {"explain", "8192,1024,4096", "--recipe", "rowwise"};
  EXPECT_TRUE(contains(tool_(words).out,
                       "n = 1008, to bf16, for want of measurements: speedup 1.084 [1.005, "));
  for (const Json& one : tool_.json(words)["flips"]) {
    EXPECT_EQ(one["convert"], false) << one;
    EXPECT_EQ(one["measured"], false) << one;
    EXPECT_GT(one["speedup"], 1.02) << one;
  }
}

TEST_F(BuiltInDevices, AnUnknownDeviceIsAnErrorThatNamesThoseThereAre) {
  Words words = {"filter",  "--model", "llama3-8b", "--tokens", "8192", "--recipe",
                 "rowwise", "-o",      "rows.txt",  "--device", "A100"};
  tool_.expect_refused(1, words,
                       {"--device", "'A100'", "'NVIDIA H200'", "'NVIDIA H100 80GB HBM3'"});
  words.back() = "NVIDIA";
  tool_.expect_refused(1, words, {"'NVIDIA' may be", "'NVIDIA H200'", "give more of the name"});
  EXPECT_FALSE(std::filesystem::exists(tool_.path() / "rows.txt"));
}

// The built-in H200 has rows of 1024 tokens, the H100 has none.
TEST_F(BuiltInDevices, RowsOfAnotherDeviceAreNamedWithTheOptionThatShowsThem) {
  const std::string kH100 = "NVIDIA H100 80GB HBM3";
  const std::string kH200 = "NVIDIA H200";
  const auto query = [&](const Words& more) {
    Words words = {"query", "--recipe", "rowwise", "--op", "linear"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const Words small = {"--mnk", "1024,1024,1024"};
  const Words small_on_h100 = {"--mnk", "1024,1024,1024", "--device", kH100};
  const Json other = tool_.json(query(small))["results"][0];
  EXPECT_EQ(other["best"]["provenance"]["device"], kH200);
  EXPECT_TRUE(contains(tool_(query(small)).out,
                       "measured on 'NVIDIA H200' and not on 'NVIDIA H100 80GB HBM3'\n"));
  const Json none = tool_.json(query(small_on_h100))["results"][0];
  EXPECT_TRUE(none["best"].is_null());
  EXPECT_EQ(none["other_devices"], Json::array({kH200}));
  const Outcome hint = tool_(query(small_on_h100));
  EXPECT_TRUE(contains(hint.out, "; --device 'NVIDIA H200' shows that")) << hint.out;
  const Json both = tool_.json(query({"--mnk", "8192,4096,4096", "--device", kH200}))["results"][0];
  EXPECT_EQ(both["best"]["provenance"]["device"], kH200);
  EXPECT_EQ(both["other_devices"], Json::array({kH100}));
  EXPECT_EQ(tool_.json({"query", "--map", "--mnk", "1024,1024,1024", "--recipe", "rowwise",
                        "--device", kH200})["device"],
            kH200);
  EXPECT_EQ(tool_.json(query({"--mnk", "1024,1024,1024", "--device", "H200"})),
            tool_.json(query({"--mnk", "1024,1024,1024", "--device", kH200})));
  tool_.expect_refused(1, query({"--mnk", "1024,1024,1024", "--device", "A100"}),
                       {"--device", "'A100'", "'NVIDIA H200'"});

  (void)tool_.write("m.json", R"([{"fqn": "a", "in_features": 1024, "out_features": 1024},
    {"fqn": "b", "in_features": 1008, "out_features": 1024}])");
  const auto filter = [&](const Words& more) {
    Words words = {"filter", "--model", "m.json", "--tokens", "1024", "--recipe", "rowwise"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  for (const Words& more : {Words{}, {"--device", kH100}}) {
    const Outcome outcome = tool_(filter(more));
    EXPECT_EQ(outcome.err,
              "1 of the 2 shapes are measured on 'NVIDIA H200' and not on 'NVIDIA H100 80GB HBM3'; "
              "--device 'NVIDIA H200' shows that\n");
    const Json decisions = tool_.json(filter(more))["decisions"];
    EXPECT_EQ(decisions[0]["other_devices"], Json::array({kH200}));
    EXPECT_EQ(decisions[1]["other_devices"], Json::array());
  }
  EXPECT_EQ(tool_(filter({"--device", kH200})).err, "");
}

TEST_F(BuiltInDevices, ARecipeThatIsNoneNamesThoseThatAre) {
  const Words words = {"query", "--mnk", "8192,4096,4096", "--recipe"};
  const auto refused = [&](const char* recipe, const Words& parts) {
    Words all = words;
    all.emplace_back(recipe);
    tool_.expect_refused(1, all, parts);
  };
  refused("nothing", {"--recipe", "'nothing'", "rowwise"});
  refused("bf16", {"--recipe", "bf16", "nothing is fp8"});
}

}  // namespace
}  // namespace f8::testing
