// Training on several ranks, each an emulated device and a thread.
#include <cmath>

#include "examples/train/checkpoint.hpp"
#include "examples/train/trainer.hpp"
#include "train_test.hpp"

namespace train {
namespace {

TrainConfig tiny(const std::string& recipe, int64_t fsdp, int64_t micro_batches, int64_t tp = 1) {
  TrainConfig config;
  config.recipe = recipe;
  // Blocks of 128 rows are not cut.
  config.hidden = recipe == "blockwise" ? 256 : 64;
  config.ffn = recipe == "blockwise" ? 256 * tp : tp == 3 ? 192 : 128;
  config.layers = 2;
  config.context = 4;
  config.tokens = 192;
  config.steps = 6;
  config.lr = 1e-2;
  config.fsdp = fsdp;
  config.micro_batches = micro_batches;
  config.tp = tp;
  return config;
}

Text sample_text() {
  Text text;
  for (int i = 0; i < 200; ++i) text.bytes += "the quick brown fox jumps over the lazy dog. ";
  text.hash = "fixed";
  return text;
}

std::vector<float> losses(const TrainConfig& config, const RunOptions& options = {}) {
  return train_on_ranks([](int rank) { return make_host_backend(rank); }, config, sample_text(),
                        options)
      .curve.loss;
}

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
  const auto [loss, master] = run(2, 1);
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

TEST(FsdpFailures, ARankThatFailsStopsAllWithItsError) {
  const TemporaryFolder folder;
  RunOptions options;
  options.checkpoint = folder / "missing" / "a";  // rank 0 alone writes it
  options.save_every = 2;
  const float8::Error error = error_of([&] { losses(tiny("rowwise", 4, 1), options); });
  EXPECT_EQ(error.code, FLOAT8_IO);
  EXPECT_NE(error.message.find("missing"), std::string::npos) << error.message;
}

// A rank whose device fails at its n-th kernel.
class FailingBackend final : public Backend {
 public:
  explicit FailingBackend(int rank) : backend_(make_host_backend(rank)) {}
  void* allocate(size_t bytes) override { return backend_->allocate(bytes); }
  void upload(void* to, const void* from, size_t bytes) override {
    backend_->upload(to, from, bytes);
  }
  void download(void* to, const void* from, size_t bytes) override {
    backend_->download(to, from, bytes);
  }
  void launch(const KernelCall& call) override {
    if (++launches_ == 100) fail(FLOAT8_CUDA, "the device of a rank is lost");
    backend_->launch(call);
  }
  int share_count() const override { return backend_->share_count(); }
  float8::Context& context() override { return backend_->context(); }
  float8_stream stream() override { return backend_->stream(); }
  void attach() override { backend_->attach(); }
  void set_communicator(const float8::Communicator* communicator) override {
    backend_->set_communicator(communicator);
  }
  void record(const std::function<void()>& step) override { backend_->record(step); }
  double repeat(int64_t times) override { return backend_->repeat(times); }

 private:
  std::unique_ptr<Backend> backend_;
  int launches_ = 0;
};

TEST(FsdpFailures, ARankThatStopsDoesNotHangTheOthers) {
  for (const int64_t tp : {1, 2}) {
    const TrainConfig config = tiny("rowwise", 2, 1, tp);
    const auto make_backend = [&](int rank) -> std::unique_ptr<Backend> {
      if (rank == config.ranks() - 1) return std::make_unique<FailingBackend>(rank);
      return make_host_backend(rank);
    };
    const float8::Error error = error_of(
        [&] { static_cast<void>(train_on_ranks(make_backend, config, sample_text(), {})); });
    EXPECT_EQ(error.message, "the device of a rank is lost");
  }
}

TEST(FsdpFailures, ALossThatIsNotFiniteOnOneRankIsOneError) {
  const TemporaryFolder folder;
  TrainConfig config = tiny("rowwise", 2, 1);
  RunOptions options;
  options.checkpoint = folder / "a";
  options.save_every = 1;
  options.stop_after = 1;
  losses(config, options);
  Checkpoint checkpoint = load(folder / "a", identity(config, "fixed"));
  // A row that the second rank alone holds: the amax over ranks takes it to all.
  checkpoint.master[static_cast<size_t>((config.ffn - 1) * config.hidden)] = NAN;
  save(folder / "a", checkpoint);
  RunOptions resumed;
  resumed.resume = folder / "a";
  const float8::Error error = error_of([&] { losses(config, resumed); });
  EXPECT_NE(error.message.find("step 2 is not finite"), std::string::npos) << error.message;
}

TEST(FsdpFailures, ABackendAloneIsOneRank) {
  const float8::Error error = error_of([&] {
    static_cast<void>(train(*make_host_backend(), tiny("bf16", 2, 1), sample_text(), {}));
  });
  EXPECT_EQ(error.code, FLOAT8_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace train
