// How well the models predict: the cost model that orders kernels, and the estimator that the
// filter asks about shapes that were not measured.
#pragma once

#include <optional>
#include <vector>

#include "tools/float8-tune/report/figures/figure.hpp"
#include "tools/float8-tune/report/figures/measurements.hpp"
#include "tuning_db/estimate/estimate_score.hpp"

namespace f8::report {

// The regret of each GEMM: what the cost model's choice costs more than the fastest of the generated
// kernels that were timed, and than the fastest of these and cuBLASLt's.
struct ChoiceRegrets {
  std::vector<double> generated, any;  // ascending
};
[[nodiscard]] ChoiceRegrets choice_regrets(const std::vector<tuner::MeasuredGemm>& gemms);

// Each returns nothing where the rows do not allow it.
[[nodiscard]] std::optional<Figure> regret_curve(const Measurements& measurements);
[[nodiscard]] std::optional<Figure> predicted_times(const Measurements& measurements, size_t device,
                                                    const std::string& recipe);
[[nodiscard]] std::optional<Figure> interval_coverage(
    const Measurements& measurements, size_t device, const std::string& recipe,
    const std::vector<tuning_db::ScoredEstimate>& rows);

}  // namespace f8::report
