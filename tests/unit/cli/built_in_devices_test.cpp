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
  for (const char* part : {"H200", "h200", "nvidia h200"}) {
    EXPECT_EQ(tool_.json({"thresholds", "--recipe", "rowwise", "--device", part}), result) << part;
  }
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
  // The kernels are those that query has of the device.
  for (const char* device : {"H100", "H200"}) {
    const Json kernel = tool_.json(
        {"explain", "8192,4096,4096", "--recipe", "rowwise", "--device", device})["kernels"][0];
    const Json best = tool_.json({"query", "--mnk", "8192,4096,4096", "--recipe", "rowwise", "--op",
                                  "output", "--device", device})["results"][0]["best"];
    EXPECT_EQ(kernel["choice"], "generated " + best["config"]["config"].get<std::string>())
        << device;
    EXPECT_EQ(kernel["chosen_by"], "measured") << device;
  }
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
    EXPECT_TRUE(outcome.err.ends_with(
        "1 of the 2 shapes are measured on 'NVIDIA H200' and not on 'NVIDIA H100 80GB HBM3'; "
        "--device 'NVIDIA H200' shows that\n"))
        << outcome.err;
    EXPECT_EQ(contains(outcome.err, "the answers are for"), more.empty()) << outcome.err;
    const Json decisions = tool_.json(filter(more))["decisions"];
    EXPECT_EQ(decisions[0]["other_devices"], Json::array({kH200}));
    EXPECT_EQ(decisions[1]["other_devices"], Json::array());
  }
  EXPECT_EQ(tool_(filter({"--device", kH200})).err, "");
}

// Of linears both devices have rows, of attention the H200 alone.
TEST_F(BuiltInDevices, WithoutAGpuAllCommandsAnswerForOneDeviceAndSaySo) {
  if (!tool_.json({"doctor"}).at("records").at("device").is_null()) {
    GTEST_SKIP() << "this machine's GPU is asked about";
  }
  const std::string kH100 = "NVIDIA H100 80GB HBM3";
  const std::string kH200 = "NVIDIA H200";
  const std::string assumed = kH100 +
                              ", since this machine has no GPU and --device is not given; there "
                              "are measurements on 'NVIDIA H200' too: "
                              "--device 'NVIDIA H200'\n";
  const std::string attention = "attention/fp8/e4m3.e4m3.bf16/s8192b1h32g8d128causal1";
  const Words filter = {"filter", "--model",  "llama3-8b", "--tokens",
                        "8192",   "--recipe", "rowwise"};
  const std::vector<Words> questions = {
      {"explain", attention},
      {"explain", "linear/rowwise+fast/e4m3.e4m3.bf16/m8192n4096k4096"},
      {"explain", "mlp/rowwise+fast/e4m3.e4m3.bf16/m8192n2816k1024gate1e0skew0"},
      {"explain", "8192,4096,4096", "--recipe", "rowwise"},
      filter};
  for (const Words& words : questions) {
    const Outcome text = tool_(words);
    EXPECT_TRUE(contains(words == filter ? text.err : text.out, assumed)) << text.out << text.err;
    EXPECT_EQ(tool_.json(words)["device"], kH100) << words[1];
    EXPECT_EQ(tool_.json(words)["other_devices"], Json::array({kH200})) << words[1];
    Words there = words;
    there.insert(there.end(), {"--device", "h200"});
    const Outcome named = tool_(there);
    EXPECT_TRUE(contains(named.out, kH200)) << named.out;
    EXPECT_FALSE(contains(named.out + named.err, "has no GPU")) << named.out << named.err;
    EXPECT_EQ(tool_.json(there)["device"], kH200) << words[1];
    EXPECT_EQ(tool_.json(there)["other_devices"], Json::array({kH100})) << words[1];
  }
  const Json kept = tool_.json({"explain", attention});
  EXPECT_EQ(kept["convert"], false);
  EXPECT_TRUE(contains(kept["reason"].get<std::string>(), "--device 'NVIDIA H200' shows that"))
      << kept;
  EXPECT_TRUE(tool_.json({"explain", attention, "--device", "H200"})["speedup_known"]);
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
