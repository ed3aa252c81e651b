// Training on several ranks, each an emulated device and a thread.
#include <cmath>

#include "examples/train/checkpoint.hpp"
#include "tiny_ranks.hpp"

namespace train {
namespace {

class Fsdp : public ::testing::TestWithParam<std::string> {
 protected:
  // The losses and the weights of a run.
  std::pair<std::vector<float>, std::vector<float>> run(int64_t fsdp, int64_t micro_batches,
                                                        int64_t tp = 1) {
    const TrainConfig config = tiny(GetParam(), fsdp, micro_batches, tp);
    RunOptions options;
    options.checkpoint = folder_ / format("%ld-%ld-%ld", fsdp, micro_batches, tp);
    options.save_every = config.steps;
    std::vector<float> curve = losses(config, options);
    return {curve, load(options.checkpoint, identity(config, "fixed")).master};
  }
  TemporaryFolder folder_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, Fsdp, ::testing::ValuesIn(recipe_names()),
                         [](const auto& recipe) { return recipe.param; });

// Delayed scales are those of all ranks' activations, and so of no micro-batch.
class FsdpBits : public Fsdp {};
INSTANTIATE_TEST_SUITE_P(Recipes, FsdpBits,
                         ::testing::Values("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp",
                                           "blockwise"),
                         [](const auto& recipe) { return recipe.param; });

TEST_P(FsdpBits, AreThoseOfMicroBatchesOnOneDevice) {
  // Three ranks hold 48, 48 and 32 of 128 rows, and 32, 32 and none of 64. Under blockwise, two ranks of
  // four hold none.
  for (const int64_t ranks : {2, 3, 4}) {
    const auto [loss, master] = run(ranks, 1);
    const auto [expected_loss, expected_master] = run(1, ranks);
    EXPECT_EQ(loss, expected_loss) << ranks;
    EXPECT_EQ(master, expected_master) << ranks;
  }
}

// Shards of 80 and 64 of 144 rows; under blockwise of 128 and 16, and the whole ends in a part of a block.
TEST_P(FsdpBits, OfUnevenShardsAreThoseOfMicroBatches) {
  TrainConfig config = tiny(GetParam(), 2, 1);
  config.ffn = 144;
  const std::vector<float> loss = losses(config);
  config.fsdp = 1;
  config.micro_batches = 2;
  EXPECT_EQ(loss, losses(config));
}

TEST_P(FsdpBits, AreThoseOfMicroBatchesUnderTensorParallelism) {
  for (const int64_t ranks : {2, 3}) {
    const auto [loss, master] = run(ranks, 1, 2);
    const auto [expected_loss, expected_master] = run(1, ranks, 2);
    // One scale of a weight spans all ranks; that is the same where FSDP does not share it out.
    EXPECT_EQ(loss, expected_loss) << ranks;
    EXPECT_EQ(master, expected_master) << ranks;
  }
}

TEST_P(Fsdp, TensorParallelismIsCloseToOneDevice) {
  for (const int64_t tp : {2, 3, 4}) {
    TrainConfig config = tiny(GetParam(), 1, 1, tp);
    config.lr = 3e-3;  // so that rounding does not grow much in a few steps
    const std::vector<float> loss = losses(config);
    config.tp = 1;
    const std::vector<float> expected = losses(config);
    EXPECT_NE(loss, expected) << "partial sums are rounded";
    for (size_t i = 0; i < loss.size(); ++i) EXPECT_NEAR(loss[i] / expected[i], 1, 0.01) << i;
  }
}

TEST_P(Fsdp, TensorParallelRunsResumeOnAnyNumberOfRanks) {
  TrainConfig config = tiny(GetParam(), 2, 1, 2);
  const std::vector<float> whole = losses(config);
  RunOptions half;
  half.checkpoint = folder_ / "half";
  half.save_every = 3;
  half.stop_after = 3;
  losses(config, half);
  RunOptions rest;
  rest.resume = folder_ / "half";
  EXPECT_EQ(losses(config, rest), whole);
  config.tp = config.fsdp = 1;
  const std::vector<float> alone = losses(config, rest);
  ASSERT_EQ(alone.size(), whole.size());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(alone[i] / whole[i], 1, 0.02) << i;
}

TEST_P(Fsdp, IsCloseToOneDevice) {
  const auto [loss, master] = run(3, 1);
  const auto [expected_loss, expected_master] = run(1, 1);
  // A delayed scale is that of the whole tensor, so nothing but sums differ.
  const double tolerance = GetParam() == "delayed" ? 1e-3 : 0.02;
  for (size_t i = 0; i < loss.size(); ++i) {
    EXPECT_NEAR(loss[i] / expected_loss[i], 1, tolerance) << i;
  }
  EXPECT_EQ(master.size(), expected_master.size());
}

TEST_P(Fsdp, MicroBatchesOfRanksAddUp) {
  const std::vector<float> one = losses(tiny(GetParam(), 1, 4));
  const std::vector<float> two = losses(tiny(GetParam(), 2, 2));
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(two[i] / one[i], 1, 0.02) << i;
}

TEST_P(Fsdp, ResumesOnAnyNumberOfRanks) {
  const TrainConfig two = tiny(GetParam(), 2, 1);
  const std::vector<float> whole = losses(two);
  RunOptions half;
  half.checkpoint = folder_ / "half";
  half.save_every = 3;
  half.stop_after = 4;
  losses(two, half);
  RunOptions rest;
  rest.resume = folder_ / "half";
  EXPECT_EQ(losses(two, rest), whole);
  const std::vector<float> alone = losses(tiny(GetParam(), 1, 2), rest);
  if (GetParam() == "delayed") {
    ASSERT_EQ(alone.size(), whole.size());
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(alone[i] / whole[i], 1, 0.02) << i;
  } else {
    EXPECT_EQ(alone, whole);
  }
}

}  // namespace
}  // namespace train
