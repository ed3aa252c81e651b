// Benchmarks in one process: everything that is compared is timed in one run, interleaved.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/tuner/backend/gpu_backend.hpp"
#include "tools/tuner/backend/weight_list.hpp"
#include "tools/tuner/measure/measurer.hpp"
#include "tools/tuner/search/sweep_plan.hpp"
#include "tools/tuner/worker/compile_ahead.hpp"

namespace f8::tuner {

struct BenchKnobs {
  double screen_ms = 12;  // a candidate's share when the best are looked for
  double final_s = 1;     // of the comparison itself
  double max_ci = 0.003;  // stop earlier once the intervals are so narrow
  int keep = 12;          // generated configurations that are screened
  int heuristics = 8;
  LinearKnobs linears;
  bool reuse_weights = false;  // of a linear: the weight's fp8 copies are made once, before
  double warm_s = 3;
  uint64_t seed = 1;
};

// One kernel of the comparison.
struct BenchRow {
  Subject subject;
  // "generated", "cublaslt best", "cublaslt tensorwise best", "rival", "cublaslt first",
  // "cublaslt bf16"; none: a finalist that was not best
  std::vector<std::string> roles;
  tuning_db::TrialResult result;
  std::optional<PairedRatio> to_rival;  // time of cuBLASLt's best fp8 kernel over this one's

  [[nodiscard]] bool is(std::string_view role) const;
};
// The fastest of the rows of one group with these impls: by their ratios to the group's reference,
// formed within blocks, since at the power cap a median tells more of when a kernel ran than of the
// kernel; where the reference was not timed, by medians. None where none was timed.
[[nodiscard]] std::optional<size_t> fastest_row(std::span<const BenchRow> rows,
                                                std::initializer_list<std::string_view> impls);

// The rival of a generated kernel is cuBLASLt's fastest in the recipe's own scales or, where those
// are by axis, with one scale for each operand, if that is faster: a user could take it instead.
struct MatmulBench {
  Problem problem;
  std::vector<BenchRow> rows;
  std::vector<BenchRow> failed;  // candidates that could not be measured, with the reason
  int screened = 0;
  std::string no_rival;  // why there is none; empty: there is

  [[nodiscard]] const BenchRow* row(std::string_view role) const;  // null: none has it
};

// What epilogues cost: the fastest kernel with each against the fastest plain one of the same run.
struct EpilogueCost {
  Epilogue epilogue;
  size_t row = 0;
  std::optional<PairedRatio> over_plain;  // time of this one over the plain one's
};
struct EpilogueBench {
  Problem problem;
  std::vector<BenchRow> rows;       // all that were compared
  std::vector<BenchRow> failed;     // candidates that could not be measured, with the reason
  std::vector<EpilogueCost> costs;  // plain first; none of those of which no kernel was measured
};

struct KernelShare {
  std::string name;
  double ns = 0;
  double bytes = 0;  // that an amax or a cast moves at least; 0: a GEMM or a clear
};
struct LinearBench {
  Problem problem;
  LinearChoices choices, twin;
  int linears = 0;  // combinations of kernels that were timed; 0: the choices were not searched
  double over_first = 1;  // the fastest kernels' linear over the fastest linear
  tuning_db::TrialResult float8, bf16;
  std::vector<KernelShare> kernels;
  std::optional<double> copy_gb_per_s;  // the ceiling measured beside the casts
};

// Weights cast one by one and in few launches, and a copy, in this order.
struct CastRow {
  std::string impl;                    // as of a Subject
  tuning_db::TrialResult result;       // the list's ratio: how many times faster than one by one
  std::optional<PairedRatio> of_copy;  // of the copy's bytes in a time
};
struct CastBench {
  double bytes = 0;       // cast_bytes()
  double copy_bytes = 0;  // that the copy reads and writes
  std::vector<CastRow> rows;
};

class Bench {
 public:
  Bench(GpuBackend& backend, CompileAhead& compiler, BenchKnobs knobs,
        std::function<void(const std::string&)> progress)
      : backend_(backend),
        compiler_(compiler),
        knobs_(knobs),
        progress_(std::move(progress)),
        session_(backend) {}

  // `config`: this generated kernel instead of the best of the candidates.
  [[nodiscard]] Result<MatmulBench> matmul(const Problem& problem,
                                           const std::optional<codegen::GemmConfig>& config);
  // Plain and each of `epilogues`, of generated kernels; the result is of problem.d.
  [[nodiscard]] Result<EpilogueBench> epilogues(const Problem& problem,
                                                std::span<const Epilogue> epilogues);
  // Kernels are looked for in this run, or without `tune` taken from the context's table or model.
  [[nodiscard]] Result<LinearBench> linear(const Problem& problem, bool tune, bool with_copy);
  [[nodiscard]] Result<CastBench> casts(const Recipe& recipe,
                                        const std::vector<runtime::MatrixSize>& weights);

 private:
  struct Screened {
    std::vector<Subject> subjects;
    std::vector<SubjectOutcome> outcomes;
    // Of `impl`, fastest first, those that were timed.
    [[nodiscard]] std::vector<size_t> ranked(std::string_view impl) const;
    void add_failed(std::vector<BenchRow>& rows) const;  // those that were not
  };
  enum class Library { kItsScales, kOneScale, kBf16 };
  [[nodiscard]] Result<std::vector<Subject>> generated(
      const Problem& gemm, const std::optional<codegen::GemmConfig>& config,
      const Epilogue& epilogue = {});
  [[nodiscard]] Result<std::vector<Subject>> library(const Problem& gemm, Library which,
                                                     std::string& why_none);
  [[nodiscard]] Result<Screened> screen(const Problem& gemm, std::vector<Subject> subjects,
                                        const char* what);
  [[nodiscard]] Result<Screened> screen_fp8(const Problem& gemm);
  [[nodiscard]] Result<Screened> screen_bf16(const Problem& gemm);
  // The rows' subjects in one group, the first one the reference; sets their results.
  [[nodiscard]] Result<std::vector<SubjectOutcome>> compare(const Problem& gemm,
                                                            std::vector<BenchRow>& rows);
  [[nodiscard]] Result<std::vector<KernelShare>> shares(int subject);

  GpuBackend& backend_;
  CompileAhead& compiler_;
  BenchKnobs knobs_;
  std::function<void(const std::string&)> progress_;
  Session session_;
  std::map<std::string, Screened> bf16_;  // by identity: all recipes share the twin's products
};

}  // namespace f8::tuner
