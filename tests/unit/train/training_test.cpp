// Tiny models take whole steps on the emulated device, under every recipe.
#include <cmath>

#include "examples/train/checkpoint.hpp"
#include "examples/train/trainer.hpp"
#include "train_test.hpp"

namespace train {
namespace {

TrainConfig tiny(const std::string& recipe) {
  TrainConfig config;
  config.recipe = recipe;
  config.hidden = 64;
  config.ffn = 128;
  config.layers = 2;
  config.context = 4;
  config.tokens = 128;
  config.steps = 30;
  config.lr = 1e-2;
  return config;
}

Text sample_text() {
  Text text;
  for (int i = 0; i < 200; ++i) text.bytes += "the quick brown fox jumps over the lazy dog. ";
  text.hash = "fixed";
  return text;
}

Curve train_tiny(const TrainConfig& config, const RunOptions& options = {}) {
  return train(*make_host_backend(), config, sample_text(), options).curve;
}

class TinyTraining : public ::testing::TestWithParam<std::string> {
 protected:
  TemporaryFolder folder_;
};

TEST_P(TinyTraining, LossFallsAsInBf16) {
  const Curve curve = train_tiny(tiny(GetParam()));
  ASSERT_EQ(curve.loss.size(), 30U);
  EXPECT_NEAR(curve.loss.front(), 5.6, 0.4);  // log 256, and what random logits add
  EXPECT_LT(curve.loss.back(), 3.0);
  const Curve bf16 = train_tiny(tiny("bf16"));
  ASSERT_EQ(bf16.loss.size(), 30U);
  EXPECT_NEAR(curve.loss.back() / bf16.loss.back(), 1, 0.1);
  if (GetParam() != "bf16") {
    EXPECT_NE(curve.loss, bf16.loss);  // the recipe did something
  }
}

TEST_P(TinyTraining, ResumingGivesTheSameBits) {
  TrainConfig config = tiny(GetParam());
  config.steps = 12;
  RunOptions whole;
  whole.checkpoint = folder_ / "whole";
  whole.save_every = 12;
  const Curve expected = train_tiny(config, whole);

  RunOptions first;
  first.checkpoint = folder_ / "half";
  first.save_every = 7;
  first.stop_after = 8;
  train_tiny(config, first);
  RunOptions second;
  second.resume = folder_ / "half";
  second.checkpoint = folder_ / "again";
  second.save_every = 12;
  const Curve resumed = train_tiny(config, second);
  EXPECT_EQ(resumed.loss, expected.loss);
  EXPECT_EQ(resumed.lr, expected.lr);

  const std::string run = identity(config, "fixed");
  const Checkpoint one = load(folder_ / "whole", run);
  const Checkpoint two = load(folder_ / "again", run);
  EXPECT_EQ(one.master, two.master);
  EXPECT_EQ(one.m, two.m);
  EXPECT_EQ(one.v, two.v);
  EXPECT_EQ(one.scales, two.scales);
  // The state has sixteen amaxes of each operand of each linear, where there is delayed scaling.
  EXPECT_EQ(one.scales.size() > 16 * sizeof(float) * 3 * 4, GetParam() == "delayed");
}

INSTANTIATE_TEST_SUITE_P(Recipes, TinyTraining, ::testing::ValuesIn(recipe_names()),
                         [](const auto& recipe) { return recipe.param; });

TEST(TinyTrainings, SeedDecidesTheBits) {
  TrainConfig config = tiny("tensorwise");
  config.steps = 4;
  const Curve one = train_tiny(config);
  EXPECT_EQ(train_tiny(config).loss, one.loss);
  config.seed = 2;
  EXPECT_NE(train_tiny(config).loss, one.loss);
}

TEST(TinyTrainings, ALossThatIsNotFiniteStopsTheRun) {
  const TemporaryFolder folder;
  const TrainConfig config = tiny("bf16");
  RunOptions options;
  options.checkpoint = folder / "a";
  options.save_every = 1;
  options.stop_after = 1;
  train_tiny(config, options);
  Checkpoint checkpoint = load(folder / "a", identity(config, "fixed"));
  checkpoint.master[0] = NAN;
  save(folder / "a", checkpoint);

  RunOptions resumed;
  resumed.resume = folder / "a";
  const float8::Error error = error_of([&] { train_tiny(config, resumed); });
  EXPECT_NE(error.message.find("step 2 is not finite"), std::string::npos) << error.message;
}

TEST(TinyTrainings, ACheckpointThatCannotBeWrittenStopsTheRun) {
  const TemporaryFolder folder;
  RunOptions options;
  options.checkpoint = folder / "missing" / "a";
  options.save_every = 1;
  EXPECT_EQ(error_of([&] { train_tiny(tiny("bf16"), options); }).code, FLOAT8_IO);
}

}  // namespace
}  // namespace train
