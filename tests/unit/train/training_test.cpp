// Whole steps of tiny models on the emulated device, under every recipe.
#include <gtest/gtest.h>

#include <cmath>

#include "base/file.hpp"
#include "examples/train/checkpoint.hpp"
#include "examples/train/trainer.hpp"

namespace f8::train {
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
  auto backend = make_host_backend();
  EXPECT_TRUE(backend.has_value()) << backend.error().message;
  if (!backend) return {};
  auto run = train(**backend, config, sample_text(), options);
  EXPECT_TRUE(run.has_value()) << run.error().message;
  return run ? std::move(run->curve) : Curve{};
}

class InAFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    auto made = make_temp_directory(fs::temp_directory_path(), "f8-train-");
    ASSERT_TRUE(made.has_value()) << made.error().message;
    folder_ = *made;
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

class TinyTraining : public InAFolder, public ::testing::WithParamInterface<std::string> {};

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
  const auto one = load(folder_ / "whole", run);
  const auto two = load(folder_ / "again", run);
  ASSERT_TRUE(one.has_value() && two.has_value());
  EXPECT_EQ(one->master, two->master);
  EXPECT_EQ(one->m, two->m);
  EXPECT_EQ(one->v, two->v);
  EXPECT_EQ(one->scales, two->scales);
  // Sixteen amaxes of each operand of each linear, where there is delayed scaling.
  EXPECT_EQ(one->scales.size() > 16 * sizeof(float) * 3 * 4, GetParam() == "delayed");
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

TEST_F(InAFolder, ALossThatIsNotFiniteStopsTheRun) {
  TrainConfig config = tiny("bf16");
  RunOptions options;
  options.checkpoint = folder_ / "a";
  options.save_every = 1;
  options.stop_after = 1;
  train_tiny(config, options);
  auto checkpoint = load(folder_ / "a", identity(config, "fixed"));
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  checkpoint->master[0] = NAN;
  ASSERT_TRUE(save(folder_ / "a", *checkpoint).has_value());

  auto backend = make_host_backend();
  ASSERT_TRUE(backend.has_value()) << backend.error().message;
  RunOptions resumed;
  resumed.resume = folder_ / "a";
  const auto run = train(**backend, config, sample_text(), resumed);
  ASSERT_FALSE(run.has_value());
  EXPECT_NE(run.error().message.find("step 2 is not finite"), std::string::npos)
      << run.error().message;
}

TEST_F(InAFolder, ACheckpointThatCannotBeWrittenStopsTheRun) {
  auto backend = make_host_backend();
  ASSERT_TRUE(backend.has_value()) << backend.error().message;
  RunOptions options;
  options.checkpoint = folder_ / "missing" / "a";
  options.save_every = 1;
  const auto run = train(**backend, tiny("bf16"), sample_text(), options);
  ASSERT_FALSE(run.has_value());
  EXPECT_EQ(run.error().code, ErrorCode::kIo);
}

}  // namespace
}  // namespace f8::train
