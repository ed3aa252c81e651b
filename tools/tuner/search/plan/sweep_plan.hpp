// The plan of a sweep: for each linear (recipe and shape; also of experts) its three GEMMs under all
// candidates, fp8 and bf16, then whole linears of the best, and the fastest linear against its bf16 baseline;
// then MLPs of such linears (mlp_plan.hpp); or the operations of attention (attention_plan.hpp). The plan is made before
// anything is launched and depends on nothing but the request, the device's figures and cuBLASLt's counts, so that a
// resumed run finds the same trials.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "recipes/mlp.hpp"
#include "tools/tuner/search/plan/attention_plan.hpp"
#include "tools/tuner/search/plan/expert_baseline.hpp"
#include "tools/tuner/search/plan/mlp_plan.hpp"

namespace f8::tuner {

// The measuring method's figures. They are stored as the run's method and are part of its identity.
struct SweepOptions {
  double screen_ms = 12;       // a candidate's share of its GEMM's screening
  double screen_drop = 1.15;   // a candidate this much slower than the fastest leaves the screening
  double final_ms = 40;        // a finalist's share
  double gemm_max_ci = 0.01;   // relative half-width of a finalist's median
  double linear_min_ms = 200;  // for a linear and its baseline together
  double linear_max_ms = 1500;
  double max_ci = 0.005;  // relative half-width of a linear's ratio
  double batch_us = 200;  // least length of a timed batch
  double linear_batch_us = 400;
  double warm_s = 3;
  int keep = 8;           // generated configurations that are measured
  int heuristics = 8;     // suggestions of cuBLASLt that are measured
  int finalists = 3;      // candidates in a GEMM's final
  bool race = false;      // the screening's times are final
  int retry_noisy = 1;    // a noisy linear is measured again, each time twice as long
  int linears = 8;        // kernel combinations timed as whole linears; 1: no search
  double linear_ms = 25;  // the share of each
  double linear_within =
      1.04;  // kernels up to this much slower than their GEMM's fastest take part

  Conditions conditions{};

  [[nodiscard]] LinearSearchOptions linear_search() const {
    return {.most = linears, .within = linear_within, .ms = linear_ms};
  }
};

// Sets the figures that make a strategy of searching a GEMM; those of a race where they are the
// defaults:
//   auto        the cost model's best are screened together, and the best of those compared
//   halving     all configurations are screened
//   topk        the cost model's best are compared, without a screening
//   race        few are screened, and the screening decides
//   exhaustive  all are compared
[[nodiscard]] Status apply_strategy(std::string_view name, SweepOptions& options);
inline constexpr std::array<std::string_view, 5> kStrategies = {"auto", "halving", "topk", "race",
                                                                "exhaustive"};

// The fewest blocks of a linear and its baseline, or of an operation of attention.
inline constexpr int kLinearBlocks = 6;

// Planning, loading, checking and capturing one candidate, which comes on top of timing it.
inline constexpr double kCandidateS = 0.008;

// A linear's shape; with experts, that of an expert linear.
struct SweptShape : Shape {
  Groups groups{};
  auto operator<=>(const SweptShape&) const = default;
};

// A run has one method, so a request is of linears or of attention.
struct SweepRequest {
  std::vector<SweptShape> shapes;
  std::vector<MlpShape> mlps;
  std::vector<std::string> recipes;
  std::optional<AttentionRequest> attention{};  // instead of shapes and recipes
  SweepOptions options;
  uint64_t seed = 1;
  bool record_pruned = true;  // keep a row for each configuration that the model ruled out
  // The table that a trainer would choose by today. Its choices take part, so that a search cannot
  // lose to none. It is not the one of the database that the sweep fills: a resumed run must find
  // the same choices.
  TuningTable prior;
  std::set<std::string>
      skipped;  // the linears and MLPs, by problem key, that are not to be measured
  // The kernels of MLPs whose linears were measured before, by problem key. The linears of others are planned too.
  std::map<std::string, MlpKernels> mlp_kernels{};

  // The noun says what a sweep asks for: "linears".
  [[nodiscard]] std::string_view noun() const {
    return attention ? "operations of attention" : mlps.empty() ? "linears" : "linears and MLPs";
  }
};
// Its linears and MLPs, or the operations of its attentions.
[[nodiscard]] Result<std::vector<Problem>> problems_of(const SweepRequest& request);
// How it measures attention.
[[nodiscard]] AttentionMethod attention_method(const SweepRequest& request);
[[nodiscard]] tuning_db::Method method_of(const SweepRequest& request);

struct PlannedGemm {
  Problem problem;
  std::vector<Generated> generated;
  // The suggestions of cuBLASLt that are measured; none in fp8 where the recipe keeps this GEMM in
  // bf16, and of a grouped GEMM.
  std::vector<int> fp8_suggestions, bf16_suggestions;
  std::vector<runtime::GemmChoice> prior;  // what a plan takes without a search
};

// A linear; or an MLP or an operation of attention, which have no GEMMs of their own.
struct PlannedLinear {
  Problem problem;
  std::vector<PlannedGemm> gemms{};            // indexed by Gemm
  std::optional<ExpertBaseline> baseline;      // of experts
  std::vector<codegen::KernelSpec> kernels{};  // of attention and MLPs: what is compiled ahead
  std::optional<MlpKernels> mlp{};  // none where the sweep is still to find those of an MLP
  double predicted_s = 0;           // of measuring all of it
};

struct SweepPlan {
  std::vector<PlannedLinear> linears;
  std::vector<tuning_db::TrialKey> trials;
  int64_t pruned = 0;  // configurations that the model rules out
  double predicted_s = 0;
};

using AskSuggestions = std::function<Result<Suggested>(const Problem& gemm, bool bf16)>;

[[nodiscard]] Result<SweepPlan> plan_sweep(const SweepRequest& request,
                                           const runtime::DeviceInfo& device,
                                           const AskSuggestions& ask);

// The method of linears.
[[nodiscard]] tuning_db::Method sweep_method(const SweepOptions& options);

}  // namespace f8::tuner
