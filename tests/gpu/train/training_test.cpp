// Short trainings on the GPU: the loss falls, the recipes agree, and bits repeat.
#include <cmath>

#include "examples/train/trainer.hpp"
#include "gpu_backend_test.hpp"
#include "tests/sanitized.hpp"
#include "tests/unit/train/train_test.hpp"

namespace train {
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
    text.bytes += format("line %d: the quick brown fox jumps over the lazy dog.\n", i * i);
  }
  text.hash = "fixed";
  return text;
}

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

// A sum over two ranks has one order, so two GPUs have the bits of one with two micro-batches.
TEST_P(GpuTraining, TwoRanksHaveTheBitsOfTwoMicroBatches) {
  TrainConfig config = small(GetParam());
  config.hidden = config.ffn = 512;
  config.steps = f8::sanitized() ? 3 : 12;
  if (gpu_backend_or_skip(config.hidden, config.context, 1) == nullptr) return;
  config.fsdp = 2;
  const auto make_backend = [&](int rank) {
    return make_gpu_backend(rank, config.hidden, config.context);
  };
  const TemporaryFolder folder;
  RunOptions options;
  options.checkpoint = folder / "two";
  options.save_every = config.steps - 1;
  const Curve two = train_on_ranks(make_backend, config, sample_text(), options).curve;
  RunOptions resume;
  resume.resume = options.checkpoint;
  config.fsdp = 1;
  config.micro_batches = 2;
  const Curve one = run(config);
  if (GetParam() == "delayed") {  // its scales are those of all ranks' activations
    for (size_t i = 0; i < one.loss.size(); ++i) {
      EXPECT_NEAR(two.loss[i] / one.loss[i], 1, 0.02) << i;
    }
    return;
  }
  EXPECT_EQ(two.loss, one.loss);
  EXPECT_EQ(run(config, resume).loss, one.loss) << "of a checkpoint of two ranks";
}

INSTANTIATE_TEST_SUITE_P(Recipes, GpuTraining, ::testing::ValuesIn(recipe_names()),
                         [](const auto& recipe) { return recipe.param; });

}  // namespace
}  // namespace train
