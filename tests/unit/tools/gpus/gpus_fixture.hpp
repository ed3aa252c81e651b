// A sweep on several fake GPUs, each with real worker processes, and a real database.
#pragma once

#include <array>
#include <mutex>
#include <set>

#include "tests/unit/tools/search/sweep_fixture.hpp"
#include "tools/tuner/gpus/campaign.hpp"

namespace f8::tuner {

class GpusTest : public SweepTest {
 protected:
  static constexpr size_t kMost = 4;

  void SetUp() override {
    SweepTest::SetUp();
    request_.shapes = {{256, 512, 256}, {512, 512, 256}, {1024, 512, 256}, {512, 1024, 256}};
    request_.recipes = {"tensorwise", "rowwise"};
    machine_.real_sleep_s = 0.0001;
  }

  // The workers of GPU i; units_[i] is what it says of itself. None starts where it is broken.
  Spawn spawn(size_t i) {
    return [this, i]() -> Result<Child> {
      // A fork beside another one would hand on its pipes.
      const std::lock_guard lock(mutex_);
      if (broken_.at(i)) return fail(ErrorCode::kEnvironment, "the GPU has fallen off the bus");
      FakeMachine machine = machine_;
      machine.unit = units_.at(i);
      machine.power_limit_w = power_limits_.at(i);
      if (fails_linears_.at(i)) {
        machine.misbehaviour = [](const Problem&, const Candidate& candidate) {
          return candidate.impl == Impl::kFloat8 ? Misbehaviour::kWrong : Misbehaviour::kNone;
        };
      }
      if (sticky_.at(i)) {
        machine.misbehaviour = [](const Problem&, const Candidate&) {
          return Misbehaviour::kSticky;
        };
      }
      const Child child = F8_TRY(spawn_fake(machine)());
      pids_.at(i) = child.pid;
      return child;
    };
  }
  Result<Campaign::Gpus> start(size_t count) {
    Campaign::Gpus gpus;
    for (size_t i = 0; i < count; ++i) {
      gpus.push_back(std::make_unique<Gpu>(
          static_cast<int>(i), spawn(i),
          WorkerOptions{
              .start_timeout_s = 200, .trial_timeout_s = trial_timeout_s_, .tick = nullptr},
          gpus_hooks_.interrupts));
      F8_TRY(gpus.back()->worker.launch());
    }
    for (const auto& gpu : gpus) F8_TRY(gpu->worker.start());
    F8_TRY(check_one_class(gpus));
    return gpus;
  }
  std::filesystem::path path() const { return directory_ / "t.f8db"; }

  // Begins a sweep, or resumes the one that left shards.
  Result<GpusOutcome> sweep_on(size_t count, double budget_s = 0) {
    Campaign::Gpus gpus = F8_TRY(start(count));
    CompileAhead compiler = make_compiler();
    Database db = F8_TRY(Database::open(path(), OpenMode::kCreate));
    std::vector<Shard> shards = shards_of_run(idle_shards(path()).value(), "");
    const CampaignIdentity identity{.argv = {"sweep"},
                                    .seed = request_.seed,
                                    .toolchain = toolchain(),
                                    .method = method_of(request_)};
    const SweepPlan full = plan();
    Campaign campaign =
        shards.empty() ? F8_TRY(Campaign::begin(path(), gpus, identity, full))
                       : F8_TRY(Campaign::resume(path(), gpus, std::move(shards), identity, full));
    wanted_ = campaign.wanted().size();
    GpusSweep sweep(gpus, compiler, request_, full, campaign.wanted(), gpus_hooks_);
    GpusOutcome outcome = sweep.run(budget_s);
    F8_TRY(campaign.end(gpus, db, outcome.total.end == SweepEnd::kDone));
    return outcome;
  }
  static std::string cell(const TrialRow& row) {
    return row.problem.key() + " " + row.candidate.key();
  }
  std::set<std::string> planned() {
    std::set<std::string> cells;
    for (const auto& trial : plan().trials) {
      cells.insert(trial.problem.key() + " " + trial.candidate.key());
    }
    return cells;
  }
  std::vector<TrialRow> stored() {
    const Database db = open();
    std::vector<TrialRow> rows;
    for (const PlannedLinear& linear : plan().linears) {
      std::vector<Problem> problems = {linear.problem};
      for (const PlannedGemm& gemm : linear.gemms) problems.push_back(gemm.problem);
      for (const Problem& problem : problems) {
        auto of_problem = db.trials(problem).value();
        for (TrialRow& row : of_problem) rows.push_back(std::move(row));
      }
    }
    return rows;
  }
  // Every planned cell is in the database, and every linear has an ok row.
  void expect_complete() {
    std::set<std::string> cells;
    std::set<std::string> linears;
    for (const TrialRow& row : stored()) {
      cells.insert(cell(row));
      const bool ok = row.result.state == TrialState::kOk;
      if (ok && row.candidate.impl == tuning_db::Impl::kFloat8) linears.insert(row.problem.key());
    }
    EXPECT_EQ(cells, planned());
    EXPECT_EQ(linears.size(), plan().linears.size());
    EXPECT_TRUE(idle_shards(path()).value().empty()) << "shards are left";
    EXPECT_TRUE(open().check());
  }
  // Kills the worker of a GPU, which never starts again, after so many of its trials.
  void break_after(size_t gpu, int trials) {
    gpus_hooks_.finished = [this, gpu, trials, seen = 0](int index, const auto&, const auto&,
                                                         const auto&) mutable {
      if (static_cast<size_t>(index) != gpu || ++seen != trials) return;
      const std::lock_guard lock(mutex_);
      broken_.at(gpu) = true;
      ::kill(pids_.at(gpu), SIGKILL);
    };
  }

  std::mutex mutex_;
  std::array<char, kMost> units_ = {'1', '2', '3', '4'};
  std::array<int, kMost> power_limits_ = {700, 700, 700, 700};
  std::array<bool, kMost> broken_{};
  std::array<bool, kMost> sticky_{};
  std::array<bool, kMost> fails_linears_{};  // and none of their GEMMs
  std::array<pid_t, kMost> pids_{};
  GpusHooks gpus_hooks_;
  size_t wanted_ = 0;
};

}  // namespace f8::tuner
