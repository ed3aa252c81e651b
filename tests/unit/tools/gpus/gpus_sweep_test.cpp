// Sweeps on several GPUs, of which some die, and sweeps that end early and are resumed.
#include <sys/mman.h>

#include <atomic>
#include <utility>

#include "tests/unit/tools/gpus/gpus_fixture.hpp"
#include "tools/tuner/search/sweep/measured.hpp"

namespace f8::tuner {
namespace {

TEST_F(GpusTest, TwoAndFourGpusMeasureEachCellOnce) {
  for (const size_t count : {size_t{2}, size_t{4}}) {
    const auto outcome = sweep_on(count);
    ASSERT_TRUE(outcome) << outcome.error().message;
    EXPECT_EQ(outcome->total.end, SweepEnd::kDone);
    EXPECT_EQ(outcome->total.progress.done, outcome->total.progress.trials);
    EXPECT_EQ(outcome->total.linears.size(), plan().linears.size());
    expect_complete();
    EXPECT_EQ(stored().size(), planned().size());
    EXPECT_EQ(open().runs()->size(), count);
    for (const GpuProgress& gpu : outcome->gpus) EXPECT_GT(gpu.progress.done, 0);
    std::filesystem::remove(path());
  }
}

TEST_F(GpusTest, TwoGpusMeasureEachOperationOfAttentionOnce) {
  request_.attention =
      AttentionRequest{.shapes = {},
                       .recipes = {kAttentionRecipes.begin(), kAttentionRecipes.end()},
                       .accuracy_tokens = 16};
  for (const int64_t tokens : {128, 256, 384, 512}) {
    request_.attention->shapes.push_back({.tokens = tokens, .head_dim = 64});
  }
  machine_.ns = [](const Problem&, const Candidate&, double) { return 100e3; };
  const auto outcome = sweep_on(2);
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->total.end, SweepEnd::kDone);
  EXPECT_EQ(outcome->total.linears.size(), 20U);
  expect_complete();
  EXPECT_EQ(stored().size(), planned().size());
  for (const TrialRow& row : stored()) {
    EXPECT_EQ(row.result.accuracy.empty(), row.candidate.impl == tuning_db::Impl::kBf16);
  }
}

// A worker's first trial ends when a worker of the other GPU has one too, which never is where a GPU
// waits for another.
TEST_F(GpusTest, TwoGpusMeasureAtTheSameTime) {
  // No two of these linears have a GEMM in common, which one GPU alone would measure once.
  request_.shapes = {{256, 512, 384}, {768, 1024, 640}, {1280, 1536, 896}, {1792, 2048, 1152}};
  request_.recipes = {"tensorwise"};
  trial_timeout_s_ = 60;
  void* const shared = ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* const measuring = new (shared) std::atomic<int>(0);
  machine_.misbehaviour = [measuring, is_first = true](const Problem&, const Candidate&) mutable {
    if (std::exchange(is_first, false)) ++*measuring;
    while (*measuring < 2) ::usleep(1000);
    return Misbehaviour::kNone;
  };
  const auto outcome = sweep_on(2);
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_FALSE(outcome->total.progress.states.contains(TrialState::kTimeout));
  for (const GpuProgress& gpu : outcome->gpus) EXPECT_GT(gpu.progress.done, 0);
  EXPECT_EQ(stored().size(), planned().size());
  ::munmap(shared, sizeof(std::atomic<int>));
}

TEST_F(GpusTest, AGpuThatDiesLosesNothing) {
  for (const size_t count : {size_t{2}, size_t{4}}) {
    broken_ = {};
    break_after(1, 9);
    const auto outcome = sweep_on(count);
    ASSERT_TRUE(outcome) << outcome.error().message;
    EXPECT_EQ(outcome->total.end, SweepEnd::kDone);
    EXPECT_EQ(outcome->gpus[1].lost, "the GPU has fallen off the bus");
    EXPECT_EQ(outcome->gpus[0].lost, "");
    EXPECT_EQ(outcome->total.progress.done, outcome->total.progress.trials);
    expect_complete();
    EXPECT_GE(stored().size(), planned().size());
    EXPECT_EQ(open().runs()->size(), count) << "what the lost one finished is there";
    std::filesystem::remove(path());
  }
}

TEST_F(GpusTest, AGpuThatFailsEveryMeasurementIsLostAndNoLinearWithIt) {
  sticky_[1] = true;
  const auto outcome = sweep_on(2);
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->total.end, SweepEnd::kDone);
  EXPECT_NE(outcome->gpus[1].lost.find("6 measurements in a row failed"), std::string::npos)
      << outcome->gpus[1].lost;
  expect_complete();
}

TEST_F(GpusTest, WhenAllDieTheSweepCanBeResumed) {
  gpus_hooks_.finished = [&, seen = 0](int, const auto&, const auto&, const auto&) mutable {
    if (++seen != 80) return;
    const std::lock_guard lock(mutex_);
    broken_ = {true, true, true, true};
    for (const pid_t pid : {pids_[0], pids_[1]}) ::kill(pid, SIGKILL);
  };
  const auto outcome = sweep_on(2);
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->total.end, SweepEnd::kDeviceLost);
  const size_t kept = stored().size();
  EXPECT_GE(kept, 80u) << "finished trials are in the database";
  EXPECT_EQ(idle_shards(path())->size(), 2u);
  broken_ = {};
  gpus_hooks_ = {};
  const auto rest = sweep_on(2);
  ASSERT_TRUE(rest) << rest.error().message;
  EXPECT_EQ(rest->total.end, SweepEnd::kDone);
  EXPECT_LT(wanted_, plan().linears.size());
  expect_complete();
}

// GPU 1 fails a linear and is lost, and GPU 0 is too before it repeats the linear. With 0 alone
// another GPU goes on, with 0 and 1 the one that is back too, with 1 alone only that one.
TEST_F(GpusTest, WhatFailedOnALostGpuIsMissingUntilItIsRepeated) {
  const auto reset = [&] {
    broken_ = {};
    fails_linears_ = {};
    gpus_hooks_ = {};
    units_ = {'1', '2', '3', '4'};
  };
  for (const std::string_view back : {"1", "12", "2"}) {
    SCOPED_TRACE(back);
    reset();
    std::string failed;
    fails_linears_[1] = true;
    gpus_hooks_.finished = [&](int gpu, const auto& trial, const auto& result, const auto&) {
      if (gpu != 1 || trial.candidate.impl != tuning_db::Impl::kFloat8 || !failed.empty()) return;
      EXPECT_FALSE(result.is_timed());
      failed = trial.problem.key();
      const std::lock_guard lock(mutex_);
      broken_ = {true, true, true, true};
      for (const pid_t pid : {pids_[0], pids_[1]}) ::kill(pid, SIGKILL);
    };
    const auto outcome = sweep_on(2);
    ASSERT_TRUE(outcome) << outcome.error().message;
    EXPECT_EQ(outcome->total.end, SweepEnd::kDeviceLost);
    ASSERT_FALSE(failed.empty());
    for (const LinearResult& linear : outcome->total.linears) {
      EXPECT_NE(linear.problem.key(), failed) << "it is not measured";
    }
    // A resume that measures nothing forgets nothing.
    reset();
    units_[0] = '9';
    const auto nothing = sweep_on(1, 1e-9);
    ASSERT_TRUE(nothing) << nothing.error().message;
    EXPECT_EQ(nothing->total.end, SweepEnd::kBudget);
    EXPECT_GE(wanted_, 1U);
    reset();
    units_[0] = back[0];
    if (back.size() > 1) units_[1] = back[1];
    const auto rest = sweep_on(back.size());
    ASSERT_TRUE(rest) << rest.error().message;
    EXPECT_EQ(rest->total.end, SweepEnd::kDone);
    expect_complete();
    int64_t listed = 0;
    for (const LinearResult& linear : rest->total.linears) listed += linear.problem.key() == failed;
    EXPECT_EQ(listed, 1);
    std::filesystem::remove(path());
  }
}

TEST_F(GpusTest, ALinearThatIsRepeatedAfterALossIsListedOnce) {
  fails_linears_[1] = true;
  gpus_hooks_.finished = [&](int gpu, const auto& trial, const auto&, const auto&) {
    if (gpu != 1 || trial.candidate.impl != tuning_db::Impl::kFloat8) return;
    const std::lock_guard lock(mutex_);
    broken_[1] = true;
    ::kill(pids_[1], SIGKILL);
  };
  const auto outcome = sweep_on(2);
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->total.end, SweepEnd::kDone);
  std::set<std::string> listed;
  for (const LinearResult& linear : outcome->total.linears) {
    EXPECT_TRUE(listed.insert(linear.problem.key()).second) << linear.problem.key();
    EXPECT_TRUE(linear.float8.is_timed()) << linear.problem.key();
  }
  EXPECT_EQ(listed.size(), plan().linears.size());
  expect_complete();
}

TEST_F(GpusTest, ABudgetHoldsForAllAndAnotherGpuGoesOn) {
  machine_.real_sleep_s = 0.01;
  const auto outcome = sweep_on(2, 0.6);
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->total.end, SweepEnd::kBudget);
  EXPECT_LT(outcome->total.progress.done, outcome->total.progress.trials);
  machine_.real_sleep_s = 0;
  units_[0] = '9';
  // A process that was killed before its run began left a shard without one.
  ASSERT_TRUE(Database::open(shard_path(path(), std::string(32, '9')), OpenMode::kCreate));
  const auto rest = sweep_on(1);
  ASSERT_TRUE(rest) << rest.error().message;
  EXPECT_EQ(rest->total.end, SweepEnd::kDone);
  EXPECT_EQ(rest->total.progress.done, rest->total.progress.trials);
  expect_complete();
  EXPECT_EQ(open().runs()->size(), 3u);
}

TEST_F(GpusTest, AnInterruptEndsAllAndIsResumed) {
  std::atomic<int> signals = 0;
  gpus_hooks_.interrupts = [&] { return signals.load(); };
  gpus_hooks_.finished = [&](int, const auto&, const auto&, const auto& total) {
    if (total.done == 25) signals = 1;
  };
  const auto outcome = sweep_on(4);
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->total.end, SweepEnd::kInterrupted);
  EXPECT_GE(stored().size(), 25u);
  for (const GpuProgress& gpu : outcome->gpus) EXPECT_EQ(gpu.lost, "");
  gpus_hooks_ = {};
  const auto rest = sweep_on(4);
  ASSERT_TRUE(rest) << rest.error().message;
  EXPECT_EQ(rest->total.end, SweepEnd::kDone);
  EXPECT_EQ(rest->total.progress.done, rest->total.progress.trials);
  expect_complete();
}

TEST_F(GpusTest, Kill9ThenResumeGivesTheCellsOfAnUninterruptedSweep) {
  machine_.real_sleep_s = 0.004;
  int killed = 0;
  for (int attempt = 0; attempt < 3; ++attempt) {
    // The child kills itself when it has measured so many trials.
    const pid_t child = ::fork();
    if (child == 0) {
      gpus_hooks_.finished = [seen = 0, last = 20 + 7 * attempt](int, const auto&, const auto&,
                                                                 const auto&) mutable {
        if (++seen == last) ::kill(::getpid(), SIGKILL);
      };
      ::_exit(sweep_on(2) ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    killed += WIFSIGNALED(status) ? 1 : 0;
  }
  EXPECT_EQ(killed, 3) << "the sweep was over before a kill";
  machine_.real_sleep_s = 0;
  const auto rest = sweep_on(2);
  ASSERT_TRUE(rest) << rest.error().message;
  EXPECT_EQ(rest->total.end, SweepEnd::kDone);
  expect_complete();
}

TEST_F(GpusTest, OneSweepAtATimeHasTheShards) {
  const std::filesystem::path database = directory_ / "t.f8db";
  {
    const auto first = lock_shards(database);
    ASSERT_TRUE(first) << first.error().message;
    const auto second = lock_shards(database);
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(second.error().message.find("another sweep on several GPUs"), std::string::npos);
    EXPECT_TRUE(lock_shards(directory_ / "other.f8db"));
    EXPECT_TRUE(idle_shards(database).value().empty()) << "the lock is no shard";
  }
  EXPECT_TRUE(lock_shards(database));
  const auto nowhere = lock_shards(directory_ / "missing" / "t.f8db");
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().code, ErrorCode::kIo);
}

TEST_F(GpusTest, GpusOfTwoClassesAndOneTwiceAreRefused) {
  power_limits_[1] = 500;
  const auto classes = sweep_on(2);
  ASSERT_FALSE(classes);
  EXPECT_NE(classes.error().message.find("GPU 1 (NVIDIA H100 80GB HBM3, 500 W) is of another"),
            std::string::npos)
      << classes.error().message;
  power_limits_[1] = 700;
  units_[1] = units_[0];
  const auto twice = sweep_on(2);
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().message, "GPU 0 and GPU 1 are one device");
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(GpusTest, WhatAnotherUnitMeasuredIsNotMissing) {
  const auto all = request_.shapes;
  request_.shapes.resize(2);
  ASSERT_TRUE(sweep_on(1));
  request_.shapes = all;
  const Database db = open();
  const std::vector<const Database*> databases = {&db};
  const auto measured = measured_linears(databases, request_, h100(), toolchain());
  ASSERT_TRUE(measured) << measured.error().message;
  EXPECT_EQ(measured->size(), 4u);
  tuning_db::Toolchain newer = toolchain();
  newer.driver = "590";
  newer.git_sha = "1";
  EXPECT_EQ(measured_linears(databases, request_, h100(), newer)->size(), 4u)
      << "another revision with the same generator";
  ++newer.codegen_abi;
  EXPECT_TRUE(measured_linears(databases, request_, h100(), newer)->empty());
  tuning_db::Toolchain library = toolchain();
  library.cublaslt = "14";
  EXPECT_TRUE(measured_linears(databases, request_, h100(), library)->empty());
  runtime::DeviceInfo capped = h100();
  capped.power_limit_w = 500;
  EXPECT_TRUE(measured_linears(databases, request_, capped, toolchain())->empty());
  SweepRequest other = request_;
  other.options.final_ms *= 2;
  EXPECT_TRUE(measured_linears(databases, other, h100(), toolchain())->empty());
  request_.skipped = *measured;
  EXPECT_EQ(plan().linears.size(), 4u);
  units_[0] = '9';
  ASSERT_TRUE(sweep_on(1));
  request_.skipped.clear();
  expect_complete();
  EXPECT_EQ(stored().size(), planned().size()) << "no cell twice";
}

}  // namespace
}  // namespace f8::tuner
