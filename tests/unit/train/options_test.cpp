// The trainer's command line gives options, or one clear line that says what is wrong.
#include "examples/train/options.hpp"

#include <cmath>

#include "examples/train/parameters.hpp"
#include "train_test.hpp"

namespace train {
namespace {

std::optional<Options> parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "float8-train");
  return parse_options(static_cast<int>(arguments.size()), arguments.data());
}

TEST(TrainOptions, DefaultsAreOneRunInBf16OverTheProjectsOwnText) {
  const auto options = parse({});
  ASSERT_TRUE(options.has_value());
  ASSERT_EQ(options->runs.size(), 1U);
  EXPECT_EQ(options->runs[0].recipe, "bf16");
  EXPECT_EQ(options->data, std::vector<std::filesystem::path>{FLOAT8_SOURCE_DIR});
}

TEST(TrainOptions, RecipesAreRunsThatDifferInNothingElse) {
  const auto options = parse({"--recipes", "bf16,delayed", "--seed", "7", "--data", "a", "b"});
  ASSERT_TRUE(options.has_value());
  ASSERT_EQ(options->runs.size(), 2U);
  EXPECT_EQ(options->runs[1].recipe, "delayed");
  EXPECT_EQ(options->runs[0].seed, 7U);
  EXPECT_EQ(options->runs[1].seed, 7U);
  EXPECT_EQ(options->data.size(), 2U);
  const auto all = parse({"--recipes", "all"});
  ASSERT_TRUE(all.has_value());
  EXPECT_EQ(all->runs.size(), recipe_names().size());
}

struct BadLine {
  std::vector<const char*> arguments;
  const char* words;
};

class TrainBadOptions : public ::testing::TestWithParam<BadLine> {};

TEST_P(TrainBadOptions, AreOneLineThatNamesTheOption) {
  const float8::Error error = error_of([] { (void)parse(GetParam().arguments); });
  EXPECT_EQ(error.code, FLOAT8_INVALID_ARGUMENT);
  EXPECT_NE(error.message.find(GetParam().words), std::string::npos) << error.message;
  EXPECT_EQ(error.message.find('\n'), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(
    Lines, TrainBadOptions,
    ::testing::Values(
        BadLine{{"--recipe", "fp4"}, "'fp4'"}, BadLine{{"--recipes", "bf16,bf16"}, "2 times"},
        BadLine{{"--recipe", "bf16", "--recipes", "rowwise"}, "both"},
        BadLine{{"--recipes", "all", "--resume", "x"}, "--resume"},
        BadLine{{"--hidden", "100"}, "--hidden"}, BadLine{{"--hidden", "16384"}, "--hidden"},
        BadLine{{"--fsdp", "3"}, "--fsdp is 3"}, BadLine{{"--fsdp", "0"}, "--fsdp is 0"},
        BadLine{{"--tp", "3"}, "--tp is 3"}, BadLine{{"--tp", "0"}, "--tp is 0"},
        BadLine{{"--recipe", "blockwise", "--tp", "2", "--ffn", "320"},
                "into multiples of 128 under blockwise"},
        BadLine{{"--tp", "64", "--fsdp", "2"}, "--tp is 64"},
        BadLine{{"--fsdp", "2", "--tokens", "48"}, "--tokens (48)"},
        BadLine{{"--micro-batches", "0"}, "--micro-batches is 0"}, BadLine{{"--ffn", "8"}, "--ffn"},
        BadLine{{"--layers", "0"}, "--layers"}, BadLine{{"--context", "24"}, "--context"},
        BadLine{{"--tokens", "100"}, "--tokens"}, BadLine{{"--steps", "-1"}, "--steps"},
        BadLine{{"--lr", "0"}, "--lr"}, BadLine{{"--lr", "nan"}, "--lr"},
        BadLine{{"--timeout", "0"}, "--timeout is 0"},
        BadLine{{"--save-every", "-2"}, "--save-every"}, BadLine{{"--steps", "many"}, "--steps"},
        BadLine{{"--unknown"}, "--unknown"}));

TEST(TrainConfigs, ScheduleWarmsUpAndCools) {
  const TrainConfig config;
  const auto schedule = make_schedule(config, AdamConfig{});
  ASSERT_EQ(schedule.size(), 2000U);
  EXPECT_LT(schedule[0].lr, schedule[50].lr);
  EXPECT_NEAR(schedule[100].lr, 3e-4, 1e-8);
  EXPECT_NEAR(schedule[1999].lr, 3e-5, 1e-7);
  EXPECT_NEAR(schedule[0].m_correction, 10, 1e-4);
  EXPECT_NEAR(schedule[1999].v_correction, 1, 1e-6);
}

TEST(TrainConfigs, IdentityTellsRunsApart) {
  TrainConfig config;
  const std::string one = identity(config, "hash");
  EXPECT_NE(identity(config, "other"), one);
  EXPECT_NE(one.find(" lr=0.0003 "), one.npos) << one;
  config.lr = std::nextafter(config.lr, 1);
  EXPECT_NE(identity(config, "hash"), one);
}

TEST(TrainParameters, LieEndToEnd) {
  TrainConfig config;
  config.hidden = 64;
  config.ffn = 128;
  config.layers = 2;
  config.context = 4;
  const Parameters parameters(config);
  ASSERT_EQ(parameters.linears.size(), 5U);
  EXPECT_EQ(parameters.linears[1].offset, 64 * 128);
  EXPECT_EQ(parameters.linears[4].name, "head");
  EXPECT_EQ(parameters.decayed, 4 * 64 * 128 + 256 * 64);
  EXPECT_EQ(parameters.gain, parameters.decayed + 256 * 64);
  EXPECT_EQ(parameters.count, parameters.gain + 3 * 64);

  const auto values = parameters.initial(config);
  EXPECT_EQ(values.back(), 1.0F);  // a gain
  double squares = 0;
  for (size_t i = 0; i < 64 * 128; ++i) squares += double{values[i]} * double{values[i]};
  EXPECT_NEAR(squares / (64 * 128), 1.0 / 64, 0.1 / 64);
  config.seed = 2;
  EXPECT_NE(parameters.initial(config)[0], values[0]);
}

}  // namespace
}  // namespace train
