// How well the models predict: the cost model that orders kernels, and the estimator that the
// filter asks about shapes that were not measured.
#pragma once

#include <optional>
#include <vector>

#include "recipes/filter_rule.hpp"
#include "tools/float8-tune/report/figures/figure.hpp"
#include "tools/float8-tune/report/figures/measurements.hpp"

namespace f8::report {

// The regret of each GEMM: what the cost model's choice costs more than the fastest of the generated
// kernels that were timed, and than the fastest of these and cuBLASLt's.
struct ChoiceRegrets {
  std::vector<double> generated, any;  // ascending
};
[[nodiscard]] ChoiceRegrets choice_regrets(const std::vector<tuner::MeasuredGemm>& gemms);

// A measured linear beside what the estimator says when all rows of its N and K are left out.
struct HeldOut {
  Shape shape;
  double measured = 1;  // speedup
  double bf16_ns = 0;
  SpeedupInterval predicted;
  [[nodiscard]] bool is_covered() const {
    return measured >= predicted.lo && measured <= predicted.hi;
  }
};
// An estimator takes a time that grows with rows and with layers (N, K), and each layer needs its
// own, so that a large table has a sample of its layers held out, evenly through their order: as many
// as `effort` allows, and at least kLeastHeldOut.
inline constexpr size_t kLeastHeldOut = 5;
inline constexpr size_t kHeldOutEffort = 20'000'000;  // some seconds
[[nodiscard]] std::vector<HeldOut> held_out(const TuningTable& table, size_t device,
                                            const std::string& recipe,
                                            size_t effort = kHeldOutEffort);

// What policies cost on measured linears: the sum of their times over that of the best choice of
// each, less one.
struct PolicyRegrets {
  double measured = 0;  // of held-out shapes, as for a model whose shapes were not measured
  double torchao = 0, convert_all = 0, keep_all = 0;
  size_t linears = 0;
};
[[nodiscard]] PolicyRegrets policy_regrets(const std::vector<HeldOut>& rows,
                                           const std::string& recipe);

// Each returns nothing where the rows do not allow it.
[[nodiscard]] std::optional<Figure> regret_curve(const Measurements& measurements);
[[nodiscard]] std::optional<Figure> predicted_times(const Measurements& measurements, size_t device,
                                                    const std::string& recipe);
[[nodiscard]] std::optional<Figure> interval_coverage(const Measurements& measurements,
                                                      size_t device, const std::string& recipe,
                                                      const std::vector<HeldOut>& rows);

}  // namespace f8::report
