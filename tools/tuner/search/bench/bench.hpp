// Benchmarks in one process: everything that is compared is timed in one run, interleaved.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/tuner/backend/gpu/gpu_backend.hpp"
#include "tools/tuner/backend/weight_list.hpp"
#include "tools/tuner/measure/measurer.hpp"
#include "tools/tuner/search/plan/sweep_plan.hpp"
#include "tools/tuner/worker/compile_ahead.hpp"

namespace f8::tuner {

struct BenchOptions {
  double screen_ms = 12;  // a candidate's share when the best are looked for
  double final_s = 1;     // the longest time of the comparison itself
  double max_ci = 0.003;  // the comparison stops earlier once its intervals are this narrow
  int keep = 12;          // generated configurations that are screened
  int heuristics = 8;     // suggestions of cuBLASLt that are screened
  LinearSearchOptions linears;
  bool reuse_weights = false;  // the fp8 copies of a linear's weight are made once, before
  double warm_s = 3;
  uint64_t seed = 1;
  Conditions conditions{};
};

// One kernel of the comparison.
struct BenchRow {
  Candidate candidate;
  // "generated", "cublaslt best", "cublaslt tensorwise best", "baseline", "cublaslt first",
  // "cublaslt bf16"; none: a finalist that was not best
  std::vector<std::string> roles;
  tuning_db::TrialResult result;
  std::optional<PairedRatio> to_baseline;  // time of cuBLASLt's best fp8 kernel over this one's

  [[nodiscard]] bool is(std::string_view role) const;
};
// The fastest of the rows of one group with one of these impls and this epilogue. What counts is
// the ratio to the group's reference, formed within blocks, because at the power cap a median tells
// more of when a kernel ran than of the kernel. Where the reference was not timed, medians count.
// None where none was timed.
[[nodiscard]] std::optional<size_t> fastest_row(std::span<const BenchRow> rows,
                                                std::initializer_list<Impl> impls,
                                                const Epilogue& epilogue = {});

// The baseline of a generated kernel is cuBLASLt's fastest in the recipe's own scales or, where
// those are by axis, the one with one scale for each operand if that is faster: a user could take
// it instead.
struct MatmulBench {
  Problem problem;
  std::vector<BenchRow> rows;
  std::vector<BenchRow> failed;  // candidates that could not be measured, with the reason
  int screened = 0;
  std::string no_baseline;  // why there is none; empty: there is

  [[nodiscard]] const BenchRow* row(std::string_view role) const;  // null: none has it
};

// The cost of epilogues: the fastest kernel with each against the fastest plain one of the same
// run.
struct EpilogueCost {
  Epilogue epilogue;
  size_t row = 0;
  std::optional<PairedRatio> over_plain;  // time of this one over the plain one's
};
struct EpilogueBench {
  Problem problem;
  std::vector<BenchRow> rows;       // all that were compared
  std::vector<BenchRow> failed;     // candidates that could not be measured, with the reason
  std::vector<EpilogueCost> costs;  // plain first; none for an epilogue without a measured kernel
};

// cuBLASLt's suggestions for a GEMM in bf16, in its order, and the one that a plan ranks first.
struct SuggestionBench {
  Problem problem;
  std::vector<runtime::Suggestion> suggestions;
  std::vector<tuning_db::TrialResult> results;  // of each
  size_t ranked_first = 0;
};

struct KernelShare {
  std::string name;
  double ns = 0;
  double bytes = 0;  // what an amax or a cast moves at least; 0: a GEMM or a clear
  int products = 0;  // as those of a runtime::Step
};
struct LinearBench {
  Problem problem;
  LinearChoices choices{}, bf16_choices{};
  int linears = 0;  // combinations of kernels that were timed; 0: the choices were not searched
  double over_first = 1;  // the time of the fastest kernels' linear over the fastest linear's
  LinearChoices untuned_choices{};  // a plan's, from the table or the cost model
  // The time of the linear of these over the fastest one's, 1 where they are the same; none without
  // a search.
  std::optional<PairedRatio> untuned{};
  tuning_db::TrialResult float8{}, bf16{};
  std::vector<KernelShare> kernels{};
  std::optional<double> copy_gb_per_s{};  // the ceiling, measured interleaved with the casts
};

// An operation of attention in fp8 with its casts, whose ratio is to bf16's, and this beside it in one group.
struct AttentionTimes {
  tuning_db::TrialResult float8{};
  std::optional<tuning_db::TrialResult> bf16{};  // none: it was not timed
};
struct AttentionBench {
  Problem problem;  // the forward
  AttentionTimes forward{};
  std::optional<AttentionTimes> backward{};  // under kFp8
  std::optional<AttentionTimes> both{};      // together; none: `no_bf16` says why
  std::string no_bf16{};                     // why bf16 was not timed; empty: it was
  // The launches of forward and backward by themselves; where there is no backward, "dequantize q,k,v" behind those of
  // forward.
  std::vector<KernelShare> kernels{};
  size_t saved_bytes = 0;  // kept for a backward, o and lse among them
};

struct MeasuredTrial {
  tuning_db::TrialKey key;
  tuning_db::TrialResult result;
};
// What was timed, as rows; the row in bf16 is before the one that has a ratio to it. Each has its part of the accuracy.
[[nodiscard]] std::vector<MeasuredTrial> trials_of(
    const AttentionBench& bench, const std::vector<tuning_db::Accuracy>& accuracy);
// Keeps such rows as the trials of a run, which was begun with their keys, and ends it.
[[nodiscard]] Status keep(tuning_db::Database& db, std::string_view run_uuid,
                          std::span<const MeasuredTrial> trials);

// The reference's time over the candidate's, where both were timed.
[[nodiscard]] std::optional<PairedRatio> ratio_in_blocks(const CandidateOutcome& candidate,
                                                         const CandidateOutcome& reference,
                                                         uint64_t seed);

// Casts in two ways and a copy, in this order: weights one by one and in few launches, or a tensor behind a copy that
// stands for what computes it and as the cast computes it.
struct CastRow {
  Impl impl = Impl::kCopy;
  double bytes = 0;  // cast_bytes(), those of a producer, or what the copy reads and writes
  tuning_db::TrialResult result{};  // the second one's ratio: how many times faster than the first
  std::optional<PairedRatio> of_copy{};  // the rate of moving bytes over the copy's
};

class Bench {
 public:
  Bench(GpuBackend& backend, CompileAhead& compiler, BenchOptions options,
        std::function<void(const std::string&)> progress)
      : backend_(backend),
        compiler_(compiler),
        options_(options),
        progress_(std::move(progress)),
        measurer_(backend) {}

  // `config`: this generated kernel instead of the best of the candidates.
  [[nodiscard]] Result<MatmulBench> matmul(const Problem& problem,
                                           const std::optional<GemmConfig>& config);
  // Measures generated kernels, plain and with each of `epilogues`; the result is of type
  // problem.d.
  [[nodiscard]] Result<EpilogueBench> epilogues(const Problem& problem,
                                                std::span<const Epilogue> epilogues);
  // Measures all of cuBLASLt's suggestions for a grad_weight in bf16, whose result is of type
  // problem.d.
  [[nodiscard]] Result<SuggestionBench> suggestions(const Problem& problem);
  // Kernels are looked for in this run, or without `tune` taken from the context's table or model.
  [[nodiscard]] Result<LinearBench> linear(const Problem& problem, bool tune, bool with_copy);
  [[nodiscard]] Result<AttentionBench> attention(const Problem& problem);
  // How it measures the operations; the data of their accuracy has so many tokens.
  [[nodiscard]] AttentionMethod attention_method(int64_t accuracy_tokens) const;
  // The accuracy is that of O and of the gradients, where there is a backward, on data of each kind, in the order of
  // kAttentionData.
  [[nodiscard]] Result<std::vector<tuning_db::Accuracy>> attention_accuracy(
      AttentionRecipe recipe, const AttentionShape& shape);
  using CastRows = std::array<CastRow, 3>;
  [[nodiscard]] Result<CastRows> casts(const Recipe& recipe,
                                       const std::vector<runtime::MatrixSize>& weights);
  [[nodiscard]] Result<CastRows> producer(const Recipe& recipe, const Producer& producer,
                                          runtime::MatrixSize size);

 private:
  struct Screened {
    std::vector<Candidate> candidates;
    std::vector<CandidateOutcome> outcomes;
    // The candidates of `impl` that were timed, fastest first.
    [[nodiscard]] std::vector<size_t> ranked(Impl impl) const;
    void add_failed(std::vector<BenchRow>& rows) const;  // those that were not timed
  };
  // Measures the rows, whose bytes and candidates are given, on what is open.
  [[nodiscard]] Status measure(CastRows& rows);
  enum class Library { kItsScales, kOneScale, kBf16 };
  [[nodiscard]] Result<std::vector<Candidate>> generated(const Problem& gemm,
                                                         const std::optional<GemmConfig>& config,
                                                         const Epilogue& epilogue = {});
  [[nodiscard]] Result<std::vector<Candidate>> library(const Problem& gemm, Library which,
                                                       std::string& why_none);
  [[nodiscard]] Result<Screened> screen(const Problem& gemm, std::vector<Candidate> candidates,
                                        const char* what);
  [[nodiscard]] Result<Screened> screen_fp8(const Problem& gemm);
  [[nodiscard]] Result<Screened> screen_bf16(const Problem& gemm);
  // All candidates together, each for its share of the time.
  [[nodiscard]] InterleavedGroup group_of_shares(const Problem& problem,
                                                 std::vector<Candidate> candidates,
                                                 const Purpose& purpose, int min_blocks) const;
  [[nodiscard]] InterleavedGroup final_group(const Problem& problem, double max_s) const;
  // Measures the rows' candidates in one group, with the first one as the reference.
  [[nodiscard]] Result<std::vector<CandidateOutcome>> compare(const Problem& gemm,
                                                              std::vector<BenchRow>& rows);
  void name_best(MatmulBench& bench, bool by_axis,
                 const std::vector<CandidateOutcome>& outcomes) const;
  [[nodiscard]] Impl linear_impl() const {
    return options_.reuse_weights ? Impl::kFloat8Reused : Impl::kFloat8;
  }
  [[nodiscard]] Result<KernelShortlist> shortlist(const Problem& gemm, bool is_fp8);
  [[nodiscard]] Result<LinearChoices> planned_choices(const Problem& problem);
  [[nodiscard]] MeasureGroup results_of();  // measures a group here
  [[nodiscard]] Result<LinearChoices> baseline_of(const Problem& problem);
  [[nodiscard]] Status search_kernels(LinearBench& bench);
  [[nodiscard]] Result<std::vector<KernelShare>> shares(int candidate);
  [[nodiscard]] Result<AttentionTimes> attention_times(const Problem& operation,
                                                       std::string& no_bf16);
  [[nodiscard]] Result<double> copy_gb_per_s();

  GpuBackend& backend_;
  CompileAhead& compiler_;
  BenchOptions options_;
  std::function<void(const std::string&)> progress_;
  Measurer measurer_;
  std::map<std::string, Screened> bf16_;  // by identity: all recipes share the bf16 GEMMs
};

}  // namespace f8::tuner
