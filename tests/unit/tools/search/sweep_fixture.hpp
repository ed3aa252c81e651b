// A sweep on a fake machine: real worker processes, a real database, a fake clock.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/file.hpp"
#include "tests/unit/tools/fake_backend.hpp"
#include "tools/tuner/backend/toolchain.hpp"
#include "tools/tuner/search/sweep/sweep.hpp"

namespace f8::tuner {

using tuning_db::Database;
using tuning_db::OpenMode;
using tuning_db::TrialRow;
using tuning_db::TrialState;

inline double kernel_ns(const Candidate& s) {
  if (s.impl == Impl::kGenerated) return s.config.ends_with("g16") ? 90e3 : 100e3;
  if (s.impl == Impl::kCublasLt) return s.config == "h1" ? 140e3 : 150e3;
  return s.config == "h1" ? 190e3 : 200e3;
}
inline double sum_of_kernels(const Candidate& linear) {
  double sum = 0;
  const LinearChoices choices = parse_choices(linear.config).value();
  for (const runtime::GemmChoice& choice : choices) sum += kernel_ns(to_candidate(choice));
  return sum;
}

class SweepTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = make_temp_directory(std::filesystem::temp_directory_path(), "sweep-test").value();
    request_.shapes = {{256, 512, 256}};
    request_.recipes = {"tensorwise"};
    request_.options.keep = 3;
    request_.options.heuristics = 2;
    request_.options.finalists = 2;
    request_.options.linear_min_ms = 5;
    request_.options.linear_max_ms = 40;
    request_.options.screen_ms = 1;
    request_.options.final_ms = 5;
    request_.options.warm_s = 0.01;
    request_.record_pruned = false;
    // Generated kernels are fastest, the library is half again slower and bf16 slowest. A linear
    // takes the time of its kernels and of its casts.
    machine_.ns = [](const Problem&, const Candidate& s, double) {
      if (s.impl == Impl::kBf16) return 600e3;
      return s.impl == Impl::kFloat8 ? 40e3 + sum_of_kernels(s) : kernel_ns(s);
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
                      [&](const Problem&, bool) -> Result<Suggested> {
                        return Suggested{machine_.heuristics, machine_.unmeasured};
                      })
        .value();
  }
  static tuning_db::Toolchain toolchain() {
    return {.driver = "580",
            .cuda_runtime = "13.0",
            .nvrtc = "13.0",
            .cublaslt = "13.0",
            .nccl = "none",
            .tool_version = "0",
            .git_sha = "0",
            .git_dirty = false,
            .codegen_abi = 1};
  }
  std::string begin(Database& db) {
    const auto run = db.begin_run({"sweep"}, request_.seed, h100(), std::string(32, '0'),
                                  toolchain(), method_of(request_), plan().trials);
    EXPECT_TRUE(run) << run.error().message;
    return run->uuid;
  }
  virtual Spawn spawn() { return spawn_fake(machine_); }
  Result<SweepOutcome> sweep(Database& db, const std::string& run, double budget_s = 0) {
    CompileAhead compiler = make_compiler();
    Sweep* engine = nullptr;
    Worker worker(spawn(), {.start_timeout_s = 200,
                            .trial_timeout_s = trial_timeout_s_,
                            .tick = [&] { return engine != nullptr && engine->tick(); }});
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
      if (impl.empty() || to_string(row.candidate.impl) == impl) found.push_back(std::move(row));
    }
    return found;
  }
  Problem problem(Op op, const char* recipe = "tensorwise") {
    return Problem::make(op, *find_recipe(recipe), request_.shapes[0]).value();
  }
  // The rows of all problems of the request.
  std::map<std::string, TrialRow> all_rows() {
    std::map<std::string, TrialRow> found;
    const Database db = open();
    for (const std::string& recipe : request_.recipes) {
      for (const Shape shape : request_.shapes) {
        for (const Op op : {Op::kOutput, Op::kGradInput, Op::kGradWeight, Op::kLinear}) {
          const Problem p = Problem::make(op, *find_recipe(recipe), shape).value();
          auto of_problem = db.trials(p).value();
          for (TrialRow& row : of_problem) {
            const std::string key = p.key() + " " + row.candidate.key();
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
  double trial_timeout_s_ = 60;  // without a sign of life
};

inline bool is_generated(const Candidate& s, Op op, const Problem& p) {
  return s.impl == Impl::kGenerated && p.op == op;
}

}  // namespace f8::tuner
