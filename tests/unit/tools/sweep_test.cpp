// The sweep on a fake machine: real worker processes, a real database, a fake clock.
#include "tools/tuner/sweep.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/file.hpp"
#include "tests/unit/tools/fake_backend.hpp"
#include "tools/tuner/toolchain.hpp"

namespace f8::tuner {
namespace {

using tuning_db::Database;
using tuning_db::OpenMode;
using tuning_db::TrialRow;
using tuning_db::TrialState;

double kernel_ns(const Subject& s) {
  if (s.impl == "generated") return s.config.ends_with("g16") ? 90e3 : 100e3;
  if (s.impl == "cublaslt") return s.config == "h1" ? 140e3 : 150e3;
  return s.config == "h1" ? 190e3 : 200e3;
}
double sum_of_kernels(const Subject& linear) {
  double sum = 0;
  const LinearChoices choices = parse_choices(linear.config).value();
  for (const runtime::GemmChoice& choice : choices) sum += kernel_ns(to_subject(choice));
  return sum;
}

class SweepTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = make_temp_directory(std::filesystem::temp_directory_path(), "sweep-test").value();
    request_.shapes = {{256, 512, 256}};
    request_.recipes = {"tensorwise"};
    request_.knobs.keep = 3;
    request_.knobs.heuristics = 2;
    request_.knobs.finalists = 2;
    request_.knobs.linear_min_ms = 5;
    request_.knobs.linear_max_ms = 40;
    request_.knobs.screen_ms = 1;
    request_.knobs.final_ms = 5;
    request_.knobs.warm_s = 0.01;
    request_.record_pruned = false;
    // Generated kernels are fastest, the library half again slower, bf16 slowest; a linear takes
    // what its kernels take, and its casts.
    machine_.ns = [](const Problem&, const Subject& s, double) {
      if (s.impl == "bf16") return 600e3;
      return s.impl == "float8" ? 40e3 + sum_of_kernels(s) : kernel_ns(s);
    };
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  Database open(OpenMode mode = OpenMode::kReadWrite) {
    return std::move(Database::open(directory_ / "t.f8db", mode).value());
  }
  CompileAhead make_compiler() {
    auto cache = codegen::CubinCache::open(
        directory_ / "cache",
        [fails = compile_fails_](const codegen::KernelSource& source) -> Result<codegen::Cubin> {
          if (!fails.empty() && source.key.find(fails) != std::string::npos) {
            return fail(ErrorCode::kCompile, "error: expected a ;");
          }
          codegen::Cubin cubin;
          cubin.key = source.key;
          cubin.entry = source.entry;
          cubin.image.resize(16);
          cubin.registers = 168;
          cubin.compile_ms = 1;
          return cubin;
        });
    EXPECT_TRUE(cache) << cache.error().message;
    return CompileAhead(std::move(*cache), 1);
  }
  SweepPlan plan() {
    return plan_sweep(request_, h100(),
                      [&](const Problem&, bool) -> Result<int> { return machine_.heuristics; })
        .value();
  }
  std::string begin(Database& db) {
    const auto run =
        db.begin_run({"sweep"}, request_.seed, device_class(h100()), std::string(32, '0'),
                     {.driver = "580",
                      .cuda_runtime = "13.0",
                      .nvrtc = "13.0",
                      .cublaslt = "13.0",
                      .nccl = "none",
                      .tool_version = "0",
                      .git_sha = "0",
                      .git_dirty = false,
                      .codegen_abi = 1},
                     sweep_method(request_.knobs), plan().cells);
    EXPECT_TRUE(run) << run.error().message;
    return run->uuid;
  }
  Result<SweepOutcome> sweep(Database& db, const std::string& run, double budget_s = 0) {
    CompileAhead compiler = make_compiler();
    Sweep* engine = nullptr;
    Worker worker(spawn_fake(machine_), {.start_timeout_s = 20, .cell_timeout_s = 0.5, .tick = [&] {
                                           return engine != nullptr && engine->tick();
                                         }});
    Sweep the_sweep(db, worker, compiler, request_, hooks_);
    engine = &the_sweep;
    auto outcome = the_sweep.run(run, plan(), budget_s);
    workers_ = worker.starts();
    return outcome;
  }
  Result<SweepOutcome> sweep_all() {
    Database db = open(OpenMode::kCreate);
    run_ = begin(db);
    return sweep(db, run_);
  }
  std::vector<TrialRow> rows(const Problem& problem, std::string_view impl = "") {
    std::vector<TrialRow> found;
    auto all = open().trials(problem).value();
    for (TrialRow& row : all) {
      if (impl.empty() || row.candidate.impl == impl) found.push_back(std::move(row));
    }
    return found;
  }
  Problem problem(Op op, const char* recipe = "tensorwise") {
    return Problem::make(op, *find_recipe(recipe), request_.shapes[0]).value();
  }
  // Of all problems of the request.
  std::map<std::string, TrialRow> all_rows() {
    std::map<std::string, TrialRow> found;
    const Database db = open();
    for (const std::string& recipe : request_.recipes) {
      for (const Shape shape : request_.shapes) {
        for (const Op op : {Op::kOutput, Op::kGradInput, Op::kGradWeight, Op::kLinear}) {
          const Problem p = Problem::make(op, *find_recipe(recipe), shape).value();
          auto of_problem = db.trials(p).value();
          for (TrialRow& row : of_problem) {
            const std::string key = p.key() + " " + row.candidate.impl + " " + row.candidate.config;
            EXPECT_FALSE(found.contains(key)) << key << " was measured twice";
            found.emplace(key, std::move(row));
          }
        }
      }
    }
    return found;
  }

  std::filesystem::path directory_;
  SweepRequest request_;
  FakeMachine machine_;
  SweepHooks hooks_;
  std::string compile_fails_;
  std::string run_;
  int workers_ = 0;
};

bool is_generated(const Subject& s, Op op, const Problem& p) {
  return s.impl == "generated" && p.op == op;
}

TEST_F(SweepTest, EveryCellGetsATerminalStateAndTheLinearARatio) {
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->end, SweepEnd::kDone);
  EXPECT_EQ(outcome->progress.done, outcome->progress.cells);
  const auto found = all_rows();
  EXPECT_EQ(found.size(), plan().cells.size());
  const auto linear = rows(problem(Op::kLinear), "float8");
  ASSERT_EQ(linear.size(), 1u);
  ASSERT_EQ(linear[0].result.state, TrialState::kOk) << linear[0].result.reason;
  ASSERT_TRUE(linear[0].result.ratio);
  EXPECT_NEAR(linear[0].result.ratio->ratio, 600.0 / 310, 0.02);
  const auto twin = rows(problem(Op::kLinear), "bf16");
  ASSERT_EQ(twin.size(), 1u);
  EXPECT_EQ(linear[0].result.ratio->pair_uuid, twin[0].uuid);
  EXPECT_EQ(open().runs().value().front().state, "done");
  // The fastest of the measured kernels and the fastest bf16 ones were taken.
  EXPECT_NE(linear[0].result.reason.find("g16,generated:"), std::string::npos)
      << linear[0].result.reason;
  EXPECT_NE(twin[0].result.reason.find("cublaslt:h1,cublaslt:h1,cublaslt:h1"), std::string::npos)
      << twin[0].result.reason;
}

TEST_F(SweepTest, TheLibraryAlwaysTakesPartAndMayWin) {
  machine_.ns = [](const Problem&, const Subject& s, double) {
    return s.impl == "cublaslt" && s.config == "h1" ? 50e3 : 100e3;
  };
  ASSERT_TRUE(sweep_all());
  const auto measured = rows(problem(Op::kGradInput));
  ASSERT_FALSE(measured.empty());
  EXPECT_EQ(measured.front().candidate.impl, "cublaslt");
  EXPECT_EQ(measured.front().candidate.config, R"({"heuristic":1})");
  const auto linear = rows(problem(Op::kLinear), "float8");
  EXPECT_NE(linear.at(0).result.reason.find("cublaslt:h1,cublaslt:h1,cublaslt:h1"),
            std::string::npos);
}

TEST_F(SweepTest, TheFastestLinearDecidesWhichKernelsCount) {
  // The library is 2 % slower by itself, and in a linear everything else with it is faster.
  machine_.ns = [](const Problem& p, const Subject& s, double) {
    if (s.impl == "generated") return 100e3;
    if (s.impl == "cublaslt") return s.config == "h1" ? 102e3 : 150e3;
    if (s.impl != "float8") return 600e3;
    const auto choices = *parse_choices(s.config);
    return choices[0].provider == Provider::kCublasLt && p.op == Op::kLinear ? 280e3 : 320e3;
  };
  ASSERT_TRUE(sweep_all());
  const auto linear = rows(problem(Op::kLinear), "float8").at(0);
  const auto kernels = tuning_db::kernels_of(linear.result.reason);
  ASSERT_TRUE(kernels) << linear.result.reason;
  EXPECT_EQ(kernels->at(0), (tuning_db::LinearKernel{Provider::kCublasLt, "h1"}));
  EXPECT_EQ(kernels->at(1).provider, Provider::kGenerated);
  EXPECT_TRUE(linear.result.reason.starts_with("the fastest of ")) << linear.result.reason;
  EXPECT_NEAR(linear.result.timing->median_ns, 280e3, 5e3);
  EXPECT_EQ(rows(problem(Op::kOutput)).at(0).candidate.impl, "generated") << "alone";
  const TuningTable table = open().table().value();
  const KernelChoice* chosen = table.find(problem(Op::kOutput));
  ASSERT_NE(chosen, nullptr);
  EXPECT_EQ(chosen->provider, Provider::kCublasLt);
  EXPECT_EQ(chosen->config, "h1");
  EXPECT_NEAR(chosen->median_ns, 102e3, 2e3);
}

TEST_F(SweepTest, WhatIsChosenWithoutASearchTakesPart) {
  // The model's last choice of all, which no search would look at, is what the table has.
  const Problem output = problem(Op::kOutput);
  const std::string last =
      codegen::key(generated_candidates(output, h100(), 1).value().back().spec.config);
  request_.prior.add(KernelChoice{output, Provider::kGenerated, last, 1e3});
  machine_.ns = [last](const Problem&, const Subject& s, double) {
    return s.impl == "generated" ? (s.config == last ? 99e3 : 98e3)
           : s.impl == "float8"  ? (s.config.find(last) != std::string::npos ? 300e3 : 330e3)
                                 : 500e3;
  };
  ASSERT_TRUE(sweep_all());
  const auto kernels =
      tuning_db::kernels_of(rows(problem(Op::kLinear), "float8").at(0).result.reason);
  ASSERT_TRUE(kernels);
  EXPECT_EQ(kernels->at(0).config, last);
  const auto own = rows(output, "generated");
  EXPECT_TRUE(std::ranges::any_of(own, [&](const TrialRow& row) {
    return row.candidate.config.find(last) != std::string::npos && row.result.timing;
  }));
}

TEST_F(SweepTest, EveryRecipeGetsALinear) {
  request_.recipes.clear();
  for (const Recipe& recipe : builtin_recipes()) request_.recipes.push_back(recipe.name);
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->progress.done, outcome->progress.cells);
  ASSERT_EQ(outcome->linears.size(), request_.recipes.size());
  const TuningTable table = open().table().value();
  for (const LinearResult& linear : outcome->linears) {
    const Recipe recipe = find_recipe(linear.problem.recipe).value();
    EXPECT_EQ(linear.float8.state, TrialState::kOk) << recipe.name << linear.float8.reason;
    const auto kernels = tuning_db::kernels_of(linear.float8.reason);
    ASSERT_TRUE(kernels) << recipe.name;
    for (const Gemm gemm : kGemms) {
      const auto& kernel = kernels->at(static_cast<size_t>(gemm));
      if (!recipe.at(gemm).is_fp8()) {
        EXPECT_EQ(kernel, (tuning_db::LinearKernel{Provider::kCublasLt, "h1"}));
      }
      const Problem own = problem(to_op(gemm), recipe.name.c_str());
      const KernelChoice* chosen = table.find(own);
      ASSERT_NE(chosen, nullptr) << own.key();
      EXPECT_EQ(chosen->config, kernel.config) << own.key();
    }
  }
}

TEST_F(SweepTest, BothKindsReachTheFinal) {
  ASSERT_TRUE(sweep_all());
  for (const char* impl : {"generated", "cublaslt"}) {
    const auto of_kind = rows(problem(Op::kOutput), impl);
    EXPECT_TRUE(std::ranges::any_of(of_kind, [](const TrialRow& row) {
      return row.result.state == TrialState::kOk && row.result.timing;
    })) << impl;
  }
  // Who lost the screening is kept with its figure, but as no measurement of this method.
  const auto lost = rows(problem(Op::kOutput), "cublaslt");
  const auto pruned = std::ranges::find_if(
      lost, [](const TrialRow& row) { return row.result.state == TrialState::kPruned; });
  ASSERT_NE(pruned, lost.end());
  EXPECT_NE(pruned->result.reason.find("screened at 15"), std::string::npos)
      << pruned->result.reason;
  EXPECT_FALSE(pruned->result.timing);
}

TEST_F(SweepTest, AWrongKernelNeverWins) {
  machine_.ns = [](const Problem&, const Subject& s, double) {
    return s.impl == "generated" ? 1e3 : 100e3;
  };
  machine_.fault = [](const Problem&, const Subject& s) {
    return s.impl == "generated" ? Fault::kWrong : Fault::kNone;
  };
  ASSERT_TRUE(sweep_all());
  for (const TrialRow& row : rows(problem(Op::kOutput), "generated")) {
    EXPECT_EQ(row.result.state, TrialState::kWrong);
    EXPECT_FALSE(row.result.timing);
  }
  const auto linear = rows(problem(Op::kLinear), "float8");
  EXPECT_EQ(linear.at(0).result.reason.find("generated"), std::string::npos);
}

TEST_F(SweepTest, WithoutAnyKernelTheLinearSaysWhichGemmHasNone) {
  machine_.fault = [](const Problem& p, const Subject& s) {
    return p.op == Op::kGradWeight && s.impl != "bf16_cublaslt" ? Fault::kWrong : Fault::kNone;
  };
  ASSERT_TRUE(sweep_all());
  const auto linear = rows(problem(Op::kLinear), "float8");
  EXPECT_EQ(linear.at(0).result.state, TrialState::kLaunchError);
  EXPECT_EQ(linear.at(0).result.reason, "no kernel works for grad_weight");
  EXPECT_EQ(rows(problem(Op::kLinear), "bf16").at(0).result.state, TrialState::kOk);
}

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
  machine_.fault = [](const Problem& p, const Subject& s) {
    return p.op == Op::kOutput && s.impl == "cublaslt" && s.config == "h0" ? Fault::kHang
                                                                           : Fault::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->progress.states.at(TrialState::kTimeout), 1);
  EXPECT_EQ(outcome->progress.done, outcome->progress.cells);
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
  const std::string bad = codegen::key(candidates.front().spec.config);
  const Problem first = problem(Op::kOutput);
  machine_.fault = [bad](const Problem& p, const Subject& s) {
    return is_generated(s, Op::kOutput, p) && s.config == bad ? Fault::kAbort : Fault::kNone;
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
  EXPECT_EQ(workers_, 3) << "the third cell was not even run";
  EXPECT_EQ(outcome->progress.done, outcome->progress.cells);
}

TEST_F(SweepTest, ADeathInTheTimingIsFoundByMeasuringEachAlone) {
  machine_.fault = [](const Problem& p, const Subject& s) {
    return p.op == Op::kGradInput && s.impl == "cublaslt" && s.config == "h1"
               ? Fault::kAbortInTiming
               : Fault::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->progress.states.at(TrialState::kLaunchError), 1);
  const auto measured = rows(problem(Op::kGradInput), "generated");
  EXPECT_EQ(measured.at(0).result.state, TrialState::kOk);
}

TEST_F(SweepTest, OneProductIsMeasuredOnce) {
  request_.recipes = {"tensorwise", "rowwise"};
  ASSERT_TRUE(sweep_all());
  const auto first = rows(problem(Op::kOutput, "tensorwise"), "bf16_cublaslt");
  const auto second = rows(problem(Op::kOutput, "rowwise"), "bf16_cublaslt");
  ASSERT_EQ(first.size(), second.size());
  int shared = 0;
  for (const TrialRow& row : second) {
    shared += row.result.reason.find("the same product as output/tensorwise") != std::string::npos;
  }
  EXPECT_EQ(static_cast<size_t>(shared), second.size());
  for (const TrialRow& row : second) {
    const auto twin = std::ranges::find_if(
        first, [&](const TrialRow& r) { return r.candidate.config == row.candidate.config; });
    ASSERT_NE(twin, first.end());
    ASSERT_EQ(row.result.timing.has_value(), twin->result.timing.has_value());
    if (row.result.timing) {
      EXPECT_EQ(row.result.timing->median_ns, twin->result.timing->median_ns);
    }
  }
}

TEST_F(SweepTest, ANoisyLinearIsTriedAgainAndSaysSo) {
  machine_.block_noise = 0.0;
  machine_.noise = 0.4;
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome);
  const auto linear = rows(problem(Op::kLinear), "float8");
  EXPECT_EQ(linear.at(0).result.state, TrialState::kNoisy);
  EXPECT_NE(linear.at(0).result.reason.find("half-width"), std::string::npos);
  EXPECT_TRUE(open().linears("tensorwise").value().empty()) << "noisy rows decide nothing";
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
    EXPECT_LT(outcome->progress.done, outcome->progress.cells);
    EXPECT_EQ(db.runs().value().front().state, "interrupted");
  }
  before = all_rows();
  machine_.real_sleep_s = 0;
  Database db = open();
  const auto rest = sweep(db, run_);
  ASSERT_TRUE(rest) << rest.error().message;
  EXPECT_EQ(rest->end, SweepEnd::kDone);
  EXPECT_EQ(rest->progress.cells + static_cast<int64_t>(before.size()),
            static_cast<int64_t>(plan().cells.size()));
  const auto after = all_rows();
  EXPECT_EQ(after.size(), plan().cells.size());
  for (const auto& [key, row] : before) {
    EXPECT_EQ(after.at(key).uuid, row.uuid);
    EXPECT_EQ(after.at(key).at, row.at) << "a finished cell was touched";
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
  EXPECT_LT(outcome->progress.done, outcome->progress.cells);
  hooks_ = {};
  const auto rest = sweep(db, run_);
  ASSERT_TRUE(rest);
  EXPECT_EQ(rest->end, SweepEnd::kDone);
  EXPECT_EQ(all_rows().size(), plan().cells.size());
}

// kill -9 of the sweep at moments spread over its life; each time a resume goes on.
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
      Database db = open();
      ::_exit(sweep(db, run_) ? 0 : 1);
    }
    ::usleep(static_cast<useconds_t>(60'000 + 35'000 * attempt));
    ::kill(child, SIGKILL);
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
  EXPECT_GE(killed, 1) << "the sweep was over before the first kill";
  ASSERT_TRUE(open().check());
  Database db = open();
  const auto rest = sweep(db, run_);
  ASSERT_TRUE(rest) << rest.error().message;
  EXPECT_EQ(rest->end, SweepEnd::kDone);
  EXPECT_EQ(rest->progress.done, rest->progress.cells);
  const auto after = all_rows();
  EXPECT_EQ(after.size(), plan().cells.size());
  for (const auto& [key, row] : before) EXPECT_EQ(after.at(key).at, row.at);
}

}  // namespace
}  // namespace f8::tuner
