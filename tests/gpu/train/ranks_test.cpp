// Training on several GPUs over NCCL. Each test is skipped where there are too few of them.
#include <chrono>
#include <thread>

#include "examples/train/checkpoint.hpp"
#include "small_training.hpp"
#include "tests/sanitized.hpp"
#include "tests/unit/train/forwarding_backend.hpp"
#include "tests/unit/train/train_test.hpp"

namespace train {
namespace {

class GpuTrainingRanks : public ::testing::TestWithParam<std::string> {
 protected:
  static MakeBackend gpus(const TrainConfig& config) {
    return [width = config.hidden, context = config.context](int rank) {
      return make_gpu_backend(rank, width, context);
    };
  }
  // A short run of the test's recipe.
  static TrainConfig config_of(int64_t hidden, int64_t ffn, int64_t fsdp, int64_t tp) {
    TrainConfig config = small(GetParam());
    config.hidden = hidden;
    config.ffn = ffn;
    config.fsdp = fsdp;
    config.tp = tp;
    config.steps = f8::sanitized() ? 3 : 12;
    return config;
  }
  static bool has_gpus(const TrainConfig& config) {
    const auto last = static_cast<int>(config.ranks() - 1);
    return gpu_backend_or_skip(config.hidden, config.context, last) != nullptr;
  }
  static std::vector<float> losses(const TrainConfig& config, const RunOptions& options = {}) {
    return train_on_ranks(gpus(config), config, sample_text(), options).curve.loss;
  }
  static void expect_close(const std::vector<float>& got, const std::vector<float>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i] / expected[i], 1, 0.02) << i;
  }
  // A sum over two ranks has one order, so two FSDP ranks have the bits of two micro-batches. Delayed
  // scales are those of all ranks' activations.
  static void expect_micro_batches(const std::vector<float>& got, TrainConfig config) {
    config.micro_batches = config.fsdp;
    config.fsdp = 1;
    const std::vector<float> expected = losses(config);
    if (config.recipe == "delayed") return expect_close(got, expected);
    EXPECT_EQ(got, expected);
  }
};
INSTANTIATE_TEST_SUITE_P(Recipes, GpuTrainingRanks, ::testing::ValuesIn(recipe_names()),
                         [](const auto& recipe) { return recipe.param; });

// Shards of 256 rows: a gathered qt is read where it lies.
TEST_P(GpuTrainingRanks, EqualShardsHaveTheBitsOfMicroBatches) {
  TrainConfig config = config_of(512, 512, 2, 1);
  if (!has_gpus(config)) return;
  const TemporaryFolder folder;
  RunOptions options;
  options.checkpoint = folder / "two";
  options.save_every = config.steps - 1;
  const std::vector<float> two = losses(config, options);
  expect_micro_batches(two, config);
  RunOptions resume;
  resume.resume = options.checkpoint;
  config.fsdp = 1;
  config.micro_batches = 2;
  const std::vector<float> resumed = losses(config, resume);
  if (GetParam() == "delayed") return expect_close(resumed, two);
  EXPECT_EQ(resumed, two) << "of a checkpoint of two ranks";
}

// Shards of 208 and 192 rows, under blockwise of 256 and 144.
TEST_P(GpuTrainingRanks, UnevenShardsHaveTheBitsOfMicroBatches) {
  const TrainConfig config = config_of(320, 400, 2, 1);
  if (!has_gpus(config)) return;
  expect_micro_batches(losses(config), config);
}

TEST_P(GpuTrainingRanks, TensorParallelismIsCloseToOneDevice) {
  TrainConfig config = config_of(512, 1024, 1, 2);
  if (!has_gpus(config)) return;
  const std::vector<float> two = losses(config);
  config.tp = 1;
  expect_close(two, losses(config));
}

TEST_P(GpuTrainingRanks, BothHaveTheBitsOfMicroBatchesUnderTensorParallelism) {
  const TrainConfig config = config_of(512, 1024, 2, 2);
  if (!has_gpus(config)) return;
  expect_micro_batches(losses(config), config);
}

class GpuRankFailures : public GpuTrainingRanks {};
INSTANTIATE_TEST_SUITE_P(Recipes, GpuRankFailures, ::testing::Values("rowwise"),
                         [](const auto& recipe) { return recipe.param; });

TEST_P(GpuRankFailures, RanksThatDifferAreOneErrorBeforeTheFirstStep) {
  std::vector<TrainConfig> configs(2, config_of(256, 512, 2, 1));
  if (!has_gpus(configs.front())) return;
  configs[1].recipe = "tensorwise";
  const float8::Error error = error_of([&] {
    static_cast<void>(train_on_ranks(gpus(configs.front()), configs, sample_text(), {}));
  });
  EXPECT_TRUE(error.message.starts_with(
      "rank 1 differs in recipe: it has tensorwise, and rank 0 has rowwise"))
      << error.message;
}

// A rank whose device is lost behind its third step.
class LostBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  double repeat(int64_t times) override {
    if (++repeats_ == 3) {
      // The other rank has ended its part of the checkpoint by then.
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      fail(FLOAT8_CUDA, "the device is lost");
    }
    return ForwardingBackend::repeat(times);
  }

 private:
  int repeats_ = 0;
};

TEST_P(GpuRankFailures, ARankThatStopsIsNamedAndTheRunResumes) {
  const TrainConfig config = config_of(256, 512, 2, 1);
  if (!has_gpus(config)) return;
  const TemporaryFolder folder;
  RunOptions options;
  options.checkpoint = folder / "a";
  options.save_every = 1;
  options.rank_timeout_ms = 5000;
  const auto make_backend = [&](int rank) -> std::unique_ptr<Backend> {
    auto backend = gpus(config)(rank);
    if (rank == 0) return backend;
    return std::make_unique<LostBackend>(std::move(backend));
  };
  const float8::Error error = error_of(
      [&] { static_cast<void>(train_on_ranks(make_backend, config, sample_text(), options)); });
  EXPECT_EQ(error.message, "rank 1: step 4 failed: the device is lost");
  EXPECT_EQ(load(options.checkpoint, identity(config, "fixed")).loss.size(), 3U);
  RunOptions resume;
  resume.resume = options.checkpoint;
  EXPECT_EQ(losses(config, resume), losses(config));
}

}  // namespace
}  // namespace train
