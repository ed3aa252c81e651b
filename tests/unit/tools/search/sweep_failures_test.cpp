// Sweeps in which something fails or ends early: every trial gets its row all the same.
#include <thread>

#include "tests/unit/tools/search/sweep_fixture.hpp"

namespace f8::tuner {
namespace {

TEST_F(SweepTest, ACompileErrorIsARow) {
  const auto candidates = generated_candidates(problem(Op::kOutput), h100(), 3).value();
  compile_fails_ = codegen::key(candidates.front().spec);
  ASSERT_TRUE(sweep_all());
  int failed = 0;
  for (const TrialRow& row : rows(problem(Op::kOutput), "generated")) {
    if (row.result.state != TrialState::kCompileError) continue;
    ++failed;
    EXPECT_EQ(row.result.reason, "error: expected a ;");
  }
  EXPECT_GE(failed, 1);
  EXPECT_EQ(workers_, 1);
}

TEST_F(SweepTest, PrunedConfigurationsAreRowsWithTheirBound) {
  request_.record_pruned = true;
  ASSERT_TRUE(sweep_all());
  const auto of_kind = rows(problem(Op::kOutput), "generated");
  const auto bound = std::ranges::count_if(of_kind, [](const TrialRow& row) {
    return row.result.state == TrialState::kPruned && row.result.predicted_ns &&
           row.result.reason.starts_with("predicted ");
  });
  EXPECT_EQ(static_cast<size_t>(bound) + 3,
            codegen::gemm_candidates(gemm_spec(problem(Op::kOutput)).value()).size());
}

TEST_F(SweepTest, AHangIsATimeoutAndTheNextCellIsMeasured) {
  trial_timeout_s_ = 2;
  machine_.misbehaviour = [](const Problem& p, const Candidate& s) {
    return p.op == Op::kOutput && s.impl == Impl::kCublasLt && s.config == "h0"
               ? Misbehaviour::kHang
               : Misbehaviour::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->progress.states.at(TrialState::kTimeout), 1);
  EXPECT_EQ(outcome->progress.done, outcome->progress.trials);
  const auto library = rows(problem(Op::kOutput), "cublaslt");
  EXPECT_TRUE(std::ranges::any_of(library, [](const TrialRow& row) {
    return row.result.state == TrialState::kTimeout &&
           row.result.reason.find("no sign of life") != std::string::npos;
  }));
  EXPECT_EQ(rows(problem(Op::kLinear), "float8").at(0).result.state, TrialState::kOk);
  EXPECT_EQ(workers_, 2);
}

TEST_F(SweepTest, ACrashCostsOneCellAndTheSecondQuarantines) {
  // One kernel that takes every worker down, on three shapes.
  request_.shapes = {{256, 512, 256}, {512, 512, 256}, {1024, 512, 256}};
  const auto candidates = generated_candidates(problem(Op::kOutput), h100(), 3).value();
  const std::string bad = key(candidates.front().spec.config);
  const Problem first = problem(Op::kOutput);
  machine_.misbehaviour = [bad](const Problem& p, const Candidate& s) {
    return is_generated(s, Op::kOutput, p) && s.config == bad ? Misbehaviour::kAbort
                                                              : Misbehaviour::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  std::map<TrialState, int> states;
  int planned = 0;
  for (const Shape shape : request_.shapes) {
    const Problem p = Problem::make(Op::kOutput, *find_recipe("tensorwise"), shape).value();
    for (const TrialRow& row : rows(p, "generated")) {
      if (row.candidate.config.find(bad) == std::string::npos) continue;
      ++planned;
      ++states[row.result.state];
      EXPECT_FALSE(row.result.timing);
    }
  }
  ASSERT_GE(planned, 2) << "the test needs a kernel that several shapes try";
  EXPECT_EQ(states[TrialState::kLaunchError], 1);
  EXPECT_EQ(states[TrialState::kQuarantined], planned - 1);
  EXPECT_EQ(workers_, 3) << "the third trial was not even run";
  EXPECT_EQ(outcome->progress.done, outcome->progress.trials);
}

TEST_F(SweepTest, AWorkerThatIsKilledCostsNoTrial) {
  machine_.misbehaviour = [killed = directory_ / "killed"](const Problem& p, const Candidate&) {
    if (p.op == Op::kGradInput && !std::filesystem::exists(killed)) {
      std::ofstream(killed) << "once";
      ::kill(::getpid(), SIGKILL);
    }
    return Misbehaviour::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(workers_, 2);
  EXPECT_FALSE(outcome->progress.states.contains(TrialState::kLaunchError));
  EXPECT_EQ(outcome->progress.done, outcome->progress.trials);
}

TEST_F(SweepTest, AWorkerFailureInTheTimingIsFoundByMeasuringEachAlone) {
  machine_.misbehaviour = [](const Problem& p, const Candidate& s) {
    return p.op == Op::kGradInput && s.impl == Impl::kCublasLt && s.config == "h1"
               ? Misbehaviour::kAbortInTiming
               : Misbehaviour::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->progress.states.at(TrialState::kLaunchError), 1);
  const auto measured = rows(problem(Op::kGradInput), "generated");
  EXPECT_EQ(measured.at(0).result.state, TrialState::kOk);
}

TEST_F(SweepTest, ABudgetLeavesARunThatResumeCompletes) {
  request_.shapes = {{256, 512, 256}, {512, 512, 256}, {1024, 512, 256}};
  machine_.real_sleep_s = 0.002;
  std::map<std::string, TrialRow> before;
  {
    Database db = open(OpenMode::kCreate);
    run_ = begin(db);
    const auto outcome = sweep(db, run_, 0.2);
    ASSERT_TRUE(outcome) << outcome.error().message;
    EXPECT_EQ(outcome->end, SweepEnd::kBudget);
    EXPECT_LT(outcome->progress.done, outcome->progress.trials);
    EXPECT_EQ(db.runs().value().front().state, "interrupted");
  }
  before = all_rows();
  machine_.real_sleep_s = 0;
  Database db = open();
  const auto rest = sweep(db, run_);
  ASSERT_TRUE(rest) << rest.error().message;
  EXPECT_EQ(rest->end, SweepEnd::kDone);
  EXPECT_EQ(rest->progress.trials + static_cast<int64_t>(before.size()),
            static_cast<int64_t>(plan().trials.size()));
  const auto after = all_rows();
  EXPECT_EQ(after.size(), plan().trials.size());
  for (const auto& [key, row] : before) {
    EXPECT_EQ(after.at(key).uuid, row.uuid);
    EXPECT_EQ(after.at(key).at, row.at) << "a finished trial was touched";
  }
}

TEST_F(SweepTest, AnInterruptEndsAfterTheGroup) {
  int signals = 0;
  hooks_.interrupts = [&] { return signals; };
  hooks_.finished = [&](const auto&, const auto&, const auto&) { signals = 1; };
  Database db = open(OpenMode::kCreate);
  run_ = begin(db);
  const auto outcome = sweep(db, run_);
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->end, SweepEnd::kInterrupted);
  EXPECT_GT(outcome->progress.done, 0);
  EXPECT_LT(outcome->progress.done, outcome->progress.trials);
  hooks_ = {};
  const auto rest = sweep(db, run_);
  ASSERT_TRUE(rest);
  EXPECT_EQ(rest->end, SweepEnd::kDone);
  EXPECT_EQ(all_rows().size(), plan().trials.size());
}

// The sweep is killed (-9) at moments spread over its life, each soon after its second trial, and each
// time a resume goes on.
TEST_F(SweepTest, KilledAtAnyMomentResumeFinishesExactlyTheMissingCells) {
  request_.shapes = {{256, 512, 256}, {512, 512, 256}};
  machine_.real_sleep_s = 0.001;
  {
    Database db = open(OpenMode::kCreate);
    run_ = begin(db);
    ASSERT_TRUE(db.end_run(run_, "interrupted"));  // this process lives on, the next one goes on
  }
  std::map<std::string, TrialRow> before;
  int killed = 0;
  for (int attempt = 0; attempt < 6; ++attempt) {
    const pid_t child = ::fork();
    if (child == 0) {
      hooks_.finished = [attempt, seen = 0](const auto&, const auto&, const auto&) mutable {
        if (++seen != 2) return;
        std::thread([attempt] {
          ::usleep(static_cast<useconds_t>(1500 * attempt));
          ::kill(::getpid(), SIGKILL);
        }).detach();
      };
      Database db = open();
      ::_exit(sweep(db, run_) ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    killed += WIFSIGNALED(status) ? 1 : 0;
    const auto now = all_rows();
    for (const auto& [key, row] : before) {
      ASSERT_TRUE(now.contains(key)) << "a row was lost: " << key;
      EXPECT_EQ(now.at(key).uuid, row.uuid);
      EXPECT_EQ(now.at(key).at, row.at);
    }
    before = now;
  }
  EXPECT_EQ(killed, 6) << "the sweep was over before a kill";
  ASSERT_TRUE(open().check());
  Database db = open();
  const auto rest = sweep(db, run_);
  ASSERT_TRUE(rest) << rest.error().message;
  EXPECT_EQ(rest->end, SweepEnd::kDone);
  EXPECT_EQ(rest->progress.done, rest->progress.trials);
  const auto after = all_rows();
  EXPECT_EQ(after.size(), plan().trials.size());
  for (const auto& [key, row] : before) EXPECT_EQ(after.at(key).at, row.at);
}

}  // namespace
}  // namespace f8::tuner
