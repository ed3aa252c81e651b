// Short trainings on the GPU: the loss falls, the recipes agree, and bits repeat.
#include <cmath>

#include "small_training.hpp"
#include "tests/sanitized.hpp"
#include "tests/unit/train/train_test.hpp"

namespace train {
namespace {

class GpuTraining : public ::testing::TestWithParam<std::string> {
 protected:
  // Gives an empty curve where there is no GPU; then the test is skipped.
  static Curve run(const TrainConfig& config, const RunOptions& options = {}) {
    const auto backend = gpu_backend_or_skip(config.hidden, config.context);
    if (backend == nullptr) return {};
    return train(*backend, config, sample_text(), options).curve;
  }
};

TEST_P(GpuTraining, LossFallsAsInBf16) {
  if (f8::sanitized()) GTEST_SKIP() << "120 steps of the kernels that the other tests run";
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
  const Curve emulated = train(*make_host_backend(), config, sample_text(), {}).curve;
  for (size_t i = 0; i < gpu.loss.size(); ++i) {
    EXPECT_NEAR(gpu.loss[i] / emulated.loss[i], 1, 0.01) << "step " << i + 1;
  }
}

TEST_P(GpuTraining, BitsRepeatAndResume) {
  TrainConfig config = small(GetParam());
  RunOptions first;
  config.steps = 12;
  first.save_every = 5;
  first.stop_after = 7;
  if (f8::sanitized()) {
    config.tokens = 256;
    config.steps = 3;
    first.save_every = 1;
    first.stop_after = 2;
  }
  const TemporaryFolder folder;
  first.checkpoint = folder / "half";
  const Curve whole = run(config);
  if (IsSkipped() || HasFailure()) return;
  EXPECT_EQ(run(config).loss, whole.loss);
  run(config, first);
  RunOptions second;
  second.resume = folder / "half";
  EXPECT_EQ(run(config, second).loss, whole.loss);
}

INSTANTIATE_TEST_SUITE_P(Recipes, GpuTraining, ::testing::ValuesIn(recipe_names()),
                         [](const auto& recipe) { return recipe.param; });

}  // namespace
}  // namespace train
