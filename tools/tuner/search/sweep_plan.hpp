// What a sweep measures: for each linear (recipe and shape) its three GEMMs under all candidates,
// fp8 and bf16, then whole linears of their best, and the fastest linear against its bf16 twin. The
// plan is made before anything is launched and depends on nothing but the request, the device's
// figures and cuBLASLt's counts, so that a resumed run finds the same cells.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "tools/tuner/search/gemm_candidates.hpp"
#include "tools/tuner/search/linear_search.hpp"

namespace f8::tuner {

// The measuring method's figures: stored as the run's method, and part of its identity.
struct SweepKnobs {
  double screen_ms = 12;       // a candidate's share of its GEMM's screening
  double screen_drop = 1.15;   // this much slower than the fastest leaves the screening
  double final_ms = 40;        // a finalist's share
  double gemm_max_ci = 0.01;   // relative half-width of a finalist's median
  double linear_min_ms = 200;  // of a linear and its twin together
  double linear_max_ms = 1500;
  double max_ci = 0.005;  // relative half-width of a linear's ratio
  double batch_us = 200;  // least length of a timed batch
  double linear_batch_us = 400;
  double warm_s = 3;
  int keep = 8;        // generated configurations that are measured
  int heuristics = 8;  // of cuBLASLt
  int finalists = 3;
  int retry_noisy = 1;    // a noisy linear is measured again, each time twice as long
  int linears = 8;        // combinations of kernels that are timed as whole linears; 1: no search
  double linear_ms = 25;  // the share of each
  double linear_within = 1.04;  // of a GEMM's fastest kernel: takes part in whole linears

  [[nodiscard]] LinearKnobs linear_knobs() const {
    return {.most = linears, .within = linear_within, .ms = linear_ms};
  }
};

struct SweepRequest {
  std::vector<Shape> shapes;
  std::vector<std::string> recipes;
  SweepKnobs knobs;
  uint64_t seed = 1;
  bool record_pruned = true;  // keep a row for each configuration that the model ruled out
  // What a trainer would choose by today: its choices take part, so that a search cannot lose to
  // none. Not the table of the database that the sweep fills: a resumed run must find the same.
  TuningTable prior;
};

struct PlannedGemm {
  Problem problem;
  std::vector<Generated> generated;
  int fp8_heuristics = 0;  // 0 where the recipe keeps this GEMM in bf16
  int bf16_heuristics = 0;
  std::vector<runtime::GemmChoice> prior;  // what is chosen without a search: by model, by table
};

struct PlannedLinear {
  Problem problem;
  std::array<PlannedGemm, 3> gemms;  // indexed by Gemm
  double predicted_s = 0;            // of measuring all of it
};

struct SweepPlan {
  std::vector<PlannedLinear> linears;
  std::vector<tuning_db::Cell> cells;
  int64_t pruned = 0;  // configurations that the model rules out
  double predicted_s = 0;
};

// How many suggestions cuBLASLt has for a GEMM.
using CountHeuristics = std::function<Result<int>(const Problem& gemm, bool bf16)>;

[[nodiscard]] Result<SweepPlan> plan_sweep(const SweepRequest& request,
                                           const runtime::DeviceInfo& device,
                                           const CountHeuristics& count);

[[nodiscard]] tuning_db::Method sweep_method(const SweepKnobs& knobs);

}  // namespace f8::tuner
