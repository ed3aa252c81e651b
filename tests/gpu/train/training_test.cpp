// Short trainings on GPUs: they agree with the emulated device, which computes the same kernels on the host,
// and two ranks with two micro-batches. Each test is skipped where there are too few GPUs.
#include "tests/unit/train/tiny_training.hpp"

namespace train {
namespace {

class GpuTraining : public Training {
 protected:
  void SetUp() override { need_gpu(0); }
  void need_gpu(int index) {
    try {
      const Device device(index, false);
    } catch (const float8::Exception& error) {
      if (index == 0 && error.code() != FLOAT8_ENVIRONMENT && error.code() != FLOAT8_UNSUPPORTED)
        throw;
      GTEST_SKIP() << "no Hopper GPU " << index << ": " << error.what();
    }
  }
  static Config small(const std::string& recipe, i64 fsdp = 1, i64 micro_batches = 1) {
    Config config = tiny(recipe, fsdp, micro_batches);
    config.hidden = 320;
    config.ffn = 400;  // two ranks have 208 and 192 rows
    config.tokens = 256;
    config.lr = 2e-3;
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(Recipes, GpuTraining, ::testing::ValuesIn(kRecipes),
                         [](const auto& recipe) { return recipe.param; });

// The first moments are a tenth of the gradients.
TEST_P(GpuTraining, AgreesWithTheEmulatedDevice) {
  const Config config = small(GetParam());
  const State gpu = run(config, 1, "gpu"), gpu_later = run(config, 4, "gpu4");
  options_.emulate = true;
  const State host = run(config, 1, "host"), host_later = run(config, 4, "host4");
  expect_close(gpu_later, host_later, 0.01F);
  expect_gradient(config, {host.m.begin(), host.m.end()}, gpu.m, 20);
}

TEST_P(GpuTraining, BitsRepeatAndResume) {
  const Config config = small(GetParam());
  const State whole = run(config, 6, "whole");
  expect_same(run(config, 6, "again"), whole);
  run(config, 3, "half");
  expect_same(run(config, 6, "rest", "half"), whole);
}

// A sum over two ranks has one order. Delayed scales are those of all ranks' activations.
TEST_P(GpuTraining, TwoRanksHaveTheBitsOfMicroBatches) {
  need_gpu(1);
  if (IsSkipped()) return;
  const State two = run(small(GetParam(), 2), 6, "two");
  const State alone = run(small(GetParam(), 1, 2), 6, "alone");
  run(small(GetParam(), 2), 3, "half");
  const State resumed = run(small(GetParam(), 1, 2), 6, "rest", "half");
  if (GetParam() == "delayed") {
    expect_close(two, alone, 0.02F);
    expect_close(resumed, two, 0.02F);
  } else {
    expect_same(two, alone);
    expect_same(resumed, two);
  }
}

TEST_F(GpuTraining, ARankThatFailsStopsTheOtherAndIsNamed) {
  need_gpu(1);
  if (IsSkipped()) return;
  options_.timeout_ms = 5000;
  options_.checkpoint = folder_ / "lost";
  options_.save_every = 1;
  options_.progress = [](int rank, const State& curve) {
    if (rank == 1 && curve.loss.size() == 4) fail(FLOAT8_CUDA, "the device is lost");
  };
  const auto error = error_of([&] { (void)train(small("rowwise", 2), sample_text(), options_); });
  EXPECT_EQ(error.message, "rank 1: the device is lost");
  EXPECT_EQ(load(folder_ / "lost", name_of_run(small("rowwise"), sample_text())).loss.size(), 3U);
}

}  // namespace
}  // namespace train
