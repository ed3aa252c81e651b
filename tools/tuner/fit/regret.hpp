// Scores the cost model's choices on measured GEMMs. A GEMM's regret is the time of the configuration
// that the model chooses among those timed, over the fastest one's, less one.
// benchmarks/fit/cost_model.py fits the model's constants.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "runtime/gemm/cost_model.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuner {

struct TimedConfig {
  GemmConfig config;
  double ns = 0;
  double mad_ns = 0;       // median absolute deviation of its batches
  bool to_the_end = true;  // false: a screening's time
};
struct TimedHeuristic {  // of cuBLASLt
  std::string config;
  double ns = 0;
  double mad_ns = 0;
};
struct MeasuredGemm {
  std::string problem;      // its key
  std::string device = {};  // the key of its class
  DeviceClass device_class = {};
  codegen::GemmSpec family;
  Shape shape;   // the GEMM's own m, n and k
  Shape linear;  // the linear's
  int sm_count = 0;
  std::vector<TimedConfig> timed;  // at least two
  std::vector<TimedHeuristic> library = {};
  [[nodiscard]] double library_ns() const;     // the fastest; 0: not measured
  [[nodiscard]] double suggestion_ns() const;  // the first suggestion; 0: not measured
};
// The GEMMs of a database in which generated configurations were timed, for each device; each once,
// however many linears have it. A screening's time counts where a row has no other.
[[nodiscard]] Result<std::vector<MeasuredGemm>> measured_gemms(const tuning_db::Database& database);
// The same of rows of Database::gemms in fp8, which their reader has.
[[nodiscard]] std::vector<MeasuredGemm> measured_gemms(std::span<const tuning_db::TrialRow> rows);

struct Regret {
  int gemms = 0;
  double median = 0, p95 = 0, worst = 0;
  std::string worst_of;
  // Against the fastest of generated and library, which a full search would choose.
  double median_to_any = 0, p95_to_any = 0;  // of the model's choice of the two
};
[[nodiscard]] Regret regret(const std::vector<MeasuredGemm>& gemms,
                            const runtime::CostModel& model);

// The configuration that the model takes of those timed; equals are ranked as cheapest_config ranks
// them.
[[nodiscard]] const TimedConfig& choose(const MeasuredGemm& gemm, const runtime::CostModel& model,
                                        std::span<const runtime::NearbyWinner> nearby = {});
// Tells whether the model takes cuBLASLt's first suggestion in place of this configuration of
// choose(); the suggestion must have been timed.
[[nodiscard]] bool takes_library(const MeasuredGemm& gemm, const TimedConfig& chosen,
                                 const runtime::CostModel& model,
                                 std::span<const runtime::NearbyWinner> nearby = {});
// The winners of other layers' (n, k) GEMMs of this kind, the nearest first.
[[nodiscard]] std::vector<runtime::NearbyWinner> winners_near(
    const MeasuredGemm& gemm, const std::vector<MeasuredGemm>& gemms);

// The same where the winners of `known` in other layers (n, k) have a vote, as the rows of a tuning
// table do.
[[nodiscard]] Regret regret_with_neighbours(const std::vector<MeasuredGemm>& gemms,
                                            const std::vector<MeasuredGemm>& known,
                                            const runtime::CostModel& model);

}  // namespace f8::tuner
