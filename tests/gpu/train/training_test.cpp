// Short trainings on the GPU: the loss falls, the recipes agree, and bits repeat.
#include <cmath>

#include "base/file.hpp"
#include "examples/train/trainer.hpp"
#include "gpu_backend_test.hpp"
#include "tests/sanitized.hpp"

namespace f8::train {
namespace {

TrainConfig small(const std::string& recipe) {
  TrainConfig config;
  config.recipe = recipe;
  config.hidden = 256;
  config.ffn = 1024;
  config.layers = 2;
  config.context = 8;
  config.tokens = 1024;
  config.steps = 60;
  config.lr = 2e-3;
  return config;
}

Text sample_text() {
  Text text;
  for (int i = 0; i < 2000; ++i) {
    text.bytes += fmt::format("line {}: the quick brown fox jumps over the lazy dog.\n", i * i);
  }
  text.hash = "fixed";
  return text;
}

class GpuTraining : public ::testing::TestWithParam<std::string> {
 protected:
  // Empty where there is no GPU: then the test is skipped.
  static Curve run(const TrainConfig& config, const RunOptions& options = {}) {
    const auto backend = gpu_backend_or_skip(config.hidden, config.context);
    if (backend == nullptr) return {};
    auto result = train(*backend, config, sample_text(), options);
    EXPECT_TRUE(result.has_value()) << result.error().message;
    return result ? std::move(result->curve) : Curve{};
  }
};

TEST_P(GpuTraining, LossFallsAsInBf16) {
  if (sanitized()) GTEST_SKIP() << "120 steps of the kernels that the other tests run";
  const Curve curve = run(small(GetParam()));
  if (IsSkipped() || HasFailure()) return;
  const Curve bf16 = run(small("bf16"));
  ASSERT_EQ(curve.loss.size(), bf16.loss.size());
  EXPECT_LT(curve.loss.back(), 0.6F * curve.loss.front());
  EXPECT_NEAR(smoothed(curve.loss).back() / smoothed(bf16.loss).back(), 1, 0.02);
}

TEST_P(GpuTraining, AgreesWithTheEmulatedDevice) {
  TrainConfig config = small(GetParam());
  config.tokens = 256;
  config.steps = 4;
  const Curve gpu = run(config);
  if (IsSkipped() || HasFailure()) return;
  auto host = make_host_backend();
  ASSERT_TRUE(host.has_value()) << host.error().message;
  const auto emulated = train(**host, config, sample_text(), {});
  ASSERT_TRUE(emulated.has_value()) << emulated.error().message;
  for (size_t i = 0; i < gpu.loss.size(); ++i) {
    EXPECT_NEAR(gpu.loss[i] / emulated->curve.loss[i], 1, 0.01) << "step " << i + 1;
  }
}

TEST_P(GpuTraining, BitsRepeatAndResume) {
  TrainConfig config = small(GetParam());
  RunOptions first;
  config.steps = 12;
  first.save_every = 5;
  first.stop_after = 7;
  if (sanitized()) {
    config.tokens = 256;
    config.steps = 3;
    first.save_every = 1;
    first.stop_after = 2;
  }
  auto folder = make_temp_directory(fs::temp_directory_path(), "f8-train-");
  ASSERT_TRUE(folder.has_value()) << folder.error().message;
  first.checkpoint = *folder / "half";
  const Curve whole = run(config);
  if (!whole.loss.empty()) {
    EXPECT_EQ(run(config).loss, whole.loss);
    run(config, first);
    RunOptions second;
    second.resume = *folder / "half";
    EXPECT_EQ(run(config, second).loss, whole.loss);
  }
  fs::remove_all(*folder);
}

INSTANTIATE_TEST_SUITE_P(Recipes, GpuTraining, ::testing::ValuesIn(recipe_names()),
                         [](const auto& recipe) { return recipe.param; });

}  // namespace
}  // namespace f8::train
