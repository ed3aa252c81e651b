// A rank that fails, hangs, or has something else than the others: one error of all ranks, which names
// the rank and what it did, and a checkpoint of the last step that is done.
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <thread>

#include "examples/train/checkpoint.hpp"
#include "forwarding_backend.hpp"
#include "tiny_ranks.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace train {
namespace {

// A rank that does something of its own before each of its kernels.
class ActingBackend final : public ForwardingBackend {
 public:
  using Act = std::function<void(const KernelCall& call)>;
  ActingBackend(int rank, Act act)
      : ForwardingBackend(make_host_backend(rank)), act_(std::move(act)) {}
  void launch(const KernelCall& call) override {
    act_(call);
    ForwardingBackend::launch(call);
  }

 private:
  Act act_;
};

// Calls `act` on the last rank before its step `step` ends.
class RankFailures : public ::testing::Test {
 protected:
  MakeBackend last_rank_at(const TrainConfig& config, int64_t step,
                           const std::function<void(const AdamArgs&)>& act) {
    return [=](int rank) -> std::unique_ptr<Backend> {
      if (rank != config.ranks() - 1) return make_host_backend(rank);
      auto steps = std::make_shared<int64_t>(0);
      return std::make_unique<ActingBackend>(rank, [=](const KernelCall& call) {
        if (std::holds_alternative<AdamArgs>(call) && ++*steps == step) {
          act(std::get<AdamArgs>(call));
        }
      });
    };
  }
  float8::Error error(const MakeBackend& make_backend, const TrainConfig& config) {
    return error_of(
        [&] { static_cast<void>(train_on_ranks(make_backend, config, sample_text(), options_)); });
  }
  // The checkpoint has `steps` steps, and a run that goes on from it the bits of one that did not fail.
  void expect_resumes_behind(int64_t steps, const TrainConfig& config) {
    const Checkpoint checkpoint = load(options_.checkpoint, identity(config, "fixed"));
    EXPECT_EQ(checkpoint.loss.size(), static_cast<size_t>(steps));
    RunOptions resume;
    resume.resume = options_.checkpoint;
    EXPECT_EQ(losses(config, resume), losses(config));
  }

  TemporaryFolder folder_;
  RunOptions options_ = [this] {
    RunOptions options;
    options.checkpoint = folder_ / "a";
    options.save_every = 1;
    return options;
  }();
};

TEST_F(RankFailures, ARankThatStopsDoesNotHangTheOthers) {
  for (const char* recipe : {"rowwise", "delayed"}) {
    for (const auto& [fsdp, tp] : {std::pair{2, 1}, {3, 1}, {1, 2}, {2, 2}}) {
      const TrainConfig config = tiny(recipe, fsdp, 1, tp);
      const auto lost = [](const AdamArgs&) { fail(FLOAT8_CUDA, "the device is lost"); };
      const float8::Error found = error(last_rank_at(config, 4, lost), config);
      EXPECT_EQ(found.code, FLOAT8_CUDA);
      EXPECT_EQ(found.message,
                format("rank %ld: step 4 failed: the device is lost", config.ranks() - 1));
      expect_resumes_behind(3, config);
    }
  }
}

TEST_F(RankFailures, ARankThatDoesNotComeIsNamed) {
  const TrainConfig config = tiny("rowwise", 2, 1);
  options_.rank_timeout_ms = 1500;
  const auto hang = [](const AdamArgs&) { std::this_thread::sleep_for(std::chrono::seconds(4)); };
  const float8::Error found = error(last_rank_at(config, 3, hang), config);
  EXPECT_TRUE(found.message.starts_with("rank 0: step 3 failed: ncclAllGather: ")) << found.message;
  EXPECT_NE(found.message.find("rank 1 did not come within 1500 ms"), std::string::npos)
      << found.message;
  expect_resumes_behind(2, config);
}

// The norm of a gradient spans all ranks, and with it a NaN.
TEST_F(RankFailures, ANanInTheGradientOfOneRankIsNotSaved) {
  for (const auto& [fsdp, tp] : {std::pair{2, 1}, {1, 2}}) {
    const TrainConfig config = tiny("rowwise", fsdp, 1, tp);
    const auto spoil = [](const AdamArgs& args) {
      const_cast<float*>(args.partials)[0] = std::numeric_limits<float>::quiet_NaN();
      args.master[0] = std::numeric_limits<float>::quiet_NaN();
    };
    const float8::Error found = error(last_rank_at(config, 3, spoil), config);
    EXPECT_TRUE(found.message.starts_with("rowwise: the weights behind step 3 are not finite"))
        << found.message;
    expect_resumes_behind(2, config);
  }
}

TEST_F(RankFailures, ALossThatIsNotFiniteOnOneRankIsOneError) {
  const TrainConfig config = tiny("rowwise", 2, 1);
  options_.stop_after = 1;
  losses(config, options_);
  Checkpoint checkpoint = load(folder_ / "a", identity(config, "fixed"));
  // A row that the second rank alone holds: the amax over ranks takes it to all.
  checkpoint.master[static_cast<size_t>((config.ffn - 1) * config.hidden)] = NAN;
  save(folder_ / "a", checkpoint);
  RunOptions resumed;
  resumed.resume = folder_ / "a";
  const float8::Error found = error_of([&] { losses(config, resumed); });
  EXPECT_TRUE(found.message.starts_with("rowwise: the loss of step 2 is not finite"))
      << found.message;
}

TEST_F(RankFailures, ACheckpointThatOneRankCannotWriteStopsAll) {
  options_.checkpoint = folder_ / "missing" / "a";  // rank 0 alone writes it
  options_.save_every = 2;
  const float8::Error found = error_of([&] { losses(tiny("rowwise", 4, 1), options_); });
  EXPECT_EQ(found.code, FLOAT8_IO);
  EXPECT_TRUE(found.message.starts_with("rank 0: the checkpoint of step 2 failed: "))
      << found.message;
  EXPECT_NE(found.message.find("missing"), std::string::npos) << found.message;
}

TEST_F(RankFailures, RanksThatDifferAreOneErrorBeforeTheFirstStep) {
  struct Case {
    std::function<void(TrainConfig&)> change;
    std::string words;
  };
  const std::vector<Case> cases = {
      {[](TrainConfig& c) { c.recipe = "tensorwise"; },
       "rank 2 differs in recipe: it has tensorwise, and rank 0 has rowwise; give all ranks the "
       "same options"},
      {[](TrainConfig& c) { c.ffn = 256; },
       "rank 2 differs in shape: it has hidden 64, ffn 256, layers 2, context 4, tokens 192, and "
       "rank 0 has hidden 64, ffn 128, "},
      {[](TrainConfig& c) { c.layers = 3; },
       "rank 2 differs in shape: it has hidden 64, ffn 128, "},
      {[](TrainConfig& c) { c.micro_batches = 2; },
       "rank 2 differs in ranks: it has fsdp 3, tp 1, micro-batches 2, and rank 0 has fsdp 3, "},
      {[](TrainConfig& c) { c.seed = 7; }, "rank 2 differs in run: it has recipe=rowwise "},
  };
  for (const Case& c : cases) {
    std::vector<TrainConfig> configs(3, tiny("rowwise", 3, 1));
    c.change(configs[2]);
    const auto make = [](int rank) { return make_host_backend(rank); };
    const float8::Error found = error_of(
        [&] { static_cast<void>(train_on_ranks(make, configs, sample_text(), options_)); });
    EXPECT_EQ(found.code, FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(found.message.starts_with(c.words)) << found.message;
    EXPECT_FALSE(std::filesystem::exists(options_.checkpoint));
  }
}

// Most ranks are right, also where the first one is not among them.
TEST_F(RankFailures, ARankWithAnotherTableIsOneError) {
  const std::filesystem::path table = folder_ / "table";
  f8::TuningTable other;
  other.sources = {{"another"}};
  std::ofstream(table) << other.serialize();
  const auto make = [&](int rank) {
    auto backend = make_host_backend(rank);
    if (rank == 0) static_cast<void>(backend->context().load_table(table.string()).value());
    return backend;
  };
  const float8::Error found = error(make, tiny("rowwise", 3, 1));
  const std::string words = "rank 0 differs in table: it has " + other.hash() + ", and rank 1 has ";
  EXPECT_TRUE(found.message.starts_with(words)) << found.message;
}

// A shard that its own rank is refused: the other ranks hear that it has gone.
TEST(ShardFailures, AShardOfAWrongSizeIsOneErrorOfItsRank) {
  constexpr int kRanks = 3;
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<const float8::Context*> contexts;
  for (int rank = 0; rank < kRanks; ++rank) backends.push_back(make_host_backend(rank));
  for (const auto& backend : backends) contexts.push_back(&backend->context());
  auto communicators = float8::Communicator::create(contexts).value();
  std::vector<std::string> errors(kRanks);
  const auto body = [&](size_t rank) {
    Backend& backend = *backends[rank];
    const auto plan = [&](int64_t rows, bool over_ranks) {
      float8::QuantizerDesc desc;
      desc.operand = FLOAT8_WEIGHT;
      desc.rows_max = rows;
      desc.cols = 64;
      desc.recipe = float8::Recipe::rowwise();
      desc.over_ranks = over_ranks;
      return float8::Quantizer::plan(backend.context(), desc).value();
    };
    const float8::Quantizer shard = plan(32, true), whole = plan(96, false);
    const auto memory = [&](const float8::Quantizer& quantizer) {
      return backend.allocate(quantizer.tensor_bytes());
    };
    const float8::Tensor from = shard.view(memory(shard), rank == 1 ? 16 : 32).value();
    const float8::Tensor to = whole.view(memory(whole), 96).value();
    float8::GatherArgs args;
    args.shard = &from;
    args.whole = &to;
    args.shard_rows = 32;
    void* const workspace =
        backend.allocate(float8_gather_workspace_bytes(&to, args.shard_rows, kRanks));
    const float8::Status status =
        communicators[rank].gather_tensor(backend.context(), args, workspace, nullptr);
    errors[rank] = status.message();
    if (!status) communicators[rank].abort();
  };
  {
    std::vector<std::jthread> threads;
    for (size_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(body, rank);
  }
  EXPECT_EQ(errors[1],
            "float8_gather_args.shard has 16 rows; rank 1 of 3 has 32 of the 96 rows of whole, "
            "where shard_rows is 32");
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_NE(errors[rank].find(" has aborted the communicator"), std::string::npos)
        << errors[rank];
    EXPECT_TRUE(errors[rank].starts_with("ncclGroupEnd: ")) << errors[rank];
  }
}

TEST_F(RankFailures, ABackendAloneIsOneRank) {
  const float8::Error found = error_of([&] {
    static_cast<void>(train(*make_host_backend(), tiny("bf16", 2, 1), sample_text(), {}));
  });
  EXPECT_EQ(found.code, FLOAT8_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace train
