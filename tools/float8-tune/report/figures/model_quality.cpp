#include "tools/float8-tune/report/figures/model_quality.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tools/float8-tune/report/figures/speedups.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::report {

using tuning_db::ScoredEstimate;

namespace {

// The share of values at or below each, as a line of steps.
std::string steps(const std::vector<double>& ascending, const Axis& x, const Axis& y) {
  std::string d = f8::format("M{:.1f} {:.1f}", x.at(0), y.at(0));
  for (size_t i = 0; i < ascending.size(); ++i) {
    const std::string at = f8::format("{:.1f}", x.at(100 * ascending[i]));
    const bool goes_on =
        i + 1 < ascending.size() && f8::format("{:.1f}", x.at(100 * ascending[i + 1])) == at;
    if (goes_on) continue;  // the same step
    const double share = 100 * static_cast<double>(i + 1) / static_cast<double>(ascending.size());
    d += f8::format("H{}V{:.1f}", at, y.at(share));
  }
  return d + f8::format("H{:.1f}", x.at(x.hi()));
}

// x = y, through the frame.
void draw_diagonal(Drawing& drawing, const Axis& x, const Axis& y) {
  const double from = std::max(x.lo(), y.lo());
  const double to = std::min(x.hi(), y.hi());
  if (from < to) drawing.line(x.at(from), y.at(from), x.at(to), y.at(to), "reference");
}

}  // namespace

ChoiceRegrets choice_regrets(const std::vector<tuner::MeasuredGemm>& gemms) {
  ChoiceRegrets regrets;
  for (const tuner::MeasuredGemm& gemm : gemms) {
    const tuner::Regret one = tuner::regret({gemm}, runtime::CostModel::fitted());
    regrets.generated.push_back(one.median);
    if (gemm.library_ns() > 0) regrets.any.push_back(one.median_to_any);
  }
  std::ranges::sort(regrets.generated);
  std::ranges::sort(regrets.any);
  return regrets;
}

std::optional<Figure> regret_curve(const Measurements& measurements) {
  const ChoiceRegrets regrets = choice_regrets(measurements.choices);
  if (regrets.generated.empty()) return std::nullopt;
  Figure figure{.kind = "regret",
                .title = "Regret of the cost model's choices",
                .description = {},
                .width = kPlotWidth,
                .height = 320,
                .table = {.caption = "Regret of the cost model's choices, by share of the GEMMs",
                          .columns = {"share of GEMMs", "generated kernels", "or cuBLASLt"},
                          .rows = {}}};
  const double most = tuner::percentile(regrets.generated, 0.99);
  const Axis x(0, std::clamp(100 * most, 1.0, 40.0), false, 62, kRight);
  const Axis y(0, 100, false, 252, 10);
  Drawing drawing;
  draw_frame(drawing, x, y,
             {.x = "slower than the fastest, at most",
              .y = "share of GEMMs",
              .x_suffix = " %",
              .y_suffix = " %"});
  drawing.path(steps(regrets.generated, x, y), "curve series0");
  drawing.line(70, 306, 100, 306, "curve series0");
  drawing.text(106, 310, "among generated kernels", Drawing::Anchor::kStart, "small");
  if (!regrets.any.empty()) {
    drawing.path(steps(regrets.any, x, y), "curve dashed series1");
    drawing.line(262, 306, 292, 306, "curve dashed series1");
    drawing.text(298, 310, "or cuBLASLt's", Drawing::Anchor::kStart, "small");
  }
  for (const double share : {0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0}) {
    figure.table.rows.push_back(
        {f8::format("{:g} %", 100 * share), percent(tuner::percentile(regrets.generated, share)),
         regrets.any.empty() ? "-" : percent(tuner::percentile(regrets.any, share))});
  }
  figure.body = drawing.body();
  figure.description = f8::format(
      "How much slower the kernel is that the cost model chooses without a search, for {} GEMMs: "
      "{} "
      "in the median and {} at the 95th percentile, among the generated kernels that were timed.",
      regrets.generated.size(), percent(tuner::median(regrets.generated)),
      percent(tuner::percentile(regrets.generated, 0.95)));
  return figure;
}

std::optional<Figure> predicted_times(const Measurements& measurements, size_t device,
                                      const std::string& recipe) {
  std::vector<const GemmTimes*> gemms;
  std::vector<double> factors;
  double lo = 1e18, hi = 0;
  for (const GemmTimes& times : measurements.gemms) {
    if (times.device != device || times.problem.recipe != recipe || !times.generated) continue;
    if (!times.generated->predicted_ns || *times.generated->predicted_ns <= 0) continue;
    gemms.push_back(&times);
    const auto [low, high] = std::minmax(*times.generated->predicted_ns, times.generated->ns);
    lo = std::min(lo, low / 1e3);
    hi = std::max(hi, high / 1e3);
    factors.push_back(times.generated->ns / *times.generated->predicted_ns);
  }
  if (gemms.size() < 2) return std::nullopt;
  Figure figure{.kind = "prediction",
                .device = measurements.device_label(device),
                .recipe = recipe,
                .title = f8::format("Predicted and measured times: {}", recipe),
                .description = {},
                .width = kPlotWidth,
                .height = 320,
                .table = {.caption = f8::format("Fastest generated kernels of {}", recipe),
                          .columns = {"GEMM", "N", "K", "M", "kernel", "predicted us",
                                      "measured us", "measured / predicted"},
                          .rows = {},
                          .heads = 4}};
  const Axis x(lo, hi, true, 62, kRight);
  const Axis y(lo, hi, true, 252, 10);
  Drawing drawing;
  draw_frame(drawing, x, y, {.x = "predicted us", .y = "measured us"});
  draw_diagonal(drawing, x, y);
  constexpr Drawing::Marker kMarkers[] = {Drawing::Marker::kCircle, Drawing::Marker::kSquare,
                                          Drawing::Marker::kTriangle};
  for (const GemmTimes* gemm : gemms) {
    const Kernel& kernel = *gemm->generated;
    const auto op = static_cast<size_t>(gemm->problem.op);
    drawing.marker(kMarkers[op], x.at(*kernel.predicted_ns / 1e3), y.at(kernel.ns / 1e3),
                   f8::format("series{}", op));
    std::vector<std::string>& row = figure.table.rows.emplace_back(name_cells(gemm->problem));
    for (const std::string& cell :
         {config_of(kernel), microseconds(*kernel.predicted_ns), microseconds(kernel.ns),
          f8::format("{:.2f}", kernel.ns / *kernel.predicted_ns)}) {
      row.push_back(cell);
    }
  }
  double at = 70;
  for (const Gemm gemm : kGemms) {
    const auto op = static_cast<size_t>(gemm);
    drawing.marker(kMarkers[op], at, 306, f8::format("series{}", op));
    drawing.text(at + 9, 310, to_string(gemm), Drawing::Anchor::kStart, "small");
    at += 110;
  }
  figure.body = drawing.body();
  std::ranges::sort(factors);
  figure.description = f8::format(
      "The cost model's time when the sweep planned it against the measured one, on {}. Measured "
      "over predicted is {:.2f} in the median, {:.2f} to {:.2f} from the 5th to the 95th "
      "percentile. The model orders candidates, so a common factor costs nothing.",
      figure.device, tuner::median(factors), tuner::percentile(factors, 0.05),
      tuner::percentile(factors, 0.95));
  return figure;
}

std::optional<Figure> interval_coverage(const Measurements& measurements, size_t device,
                                        const std::string& recipe,
                                        const std::vector<ScoredEstimate>& rows) {
  if (rows.size() < 2) return std::nullopt;
  Figure figure{
      .kind = "coverage",
      .device = measurements.device_label(device),
      .recipe = recipe,
      .title = f8::format("Estimates of speedups that were held out: {}", recipe),
      .description = {},
      .width = kPlotWidth,
      .height = 320,
      .table = {.caption = f8::format("Held-out speedups of {}", recipe),
                .columns = {"M", "N", "K", "measured", "estimate", "interval", "in the interval"},
                .rows = {},
                .heads = 3}};
  double lo = 10, hi = 0;
  for (const auto& [truth, estimate] : rows) {
    lo = std::min({lo, truth.speedup, estimate.speedup});
    hi = std::max({hi, truth.speedup, estimate.speedup});
  }
  const Axis x(lo, hi, false, 62, kRight);
  const Axis y(lo, hi, false, 252, 10);
  Drawing drawing;
  draw_frame(drawing, x, y, {.x = "measured speedup", .y = "estimated speedup"});
  draw_diagonal(drawing, x, y);
  size_t covered = 0;
  for (const ScoredEstimate& row : rows) {
    const auto& [truth, estimate] = row;
    const bool in = row.is_held();
    covered += in ? 1 : 0;
    const char* style = in ? "series0" : "series1";
    const double at = x.at(truth.speedup);
    drawing.line(at, y.at(estimate.lo), at, y.at(estimate.hi), f8::format("whisker {}", style));
    drawing.marker(in ? Drawing::Marker::kCircle : Drawing::Marker::kCross, at,
                   y.at(estimate.speedup), style);
    figure.table.rows.push_back(
        {f8::format("{}", truth.shape.m), f8::format("{}", truth.shape.n),
         f8::format("{}", truth.shape.k), f8::format("{:.3f}", truth.speedup),
         f8::format("{:.3f}", estimate.speedup),
         f8::format("[{:.3f}, {:.3f}]", estimate.lo, estimate.hi), in ? "yes" : "no"});
  }
  drawing.marker(Drawing::Marker::kCircle, 70, 306, "series0");
  drawing.text(79, 310, "inside its interval", Drawing::Anchor::kStart, "small");
  drawing.marker(Drawing::Marker::kCross, 240, 306, "series1");
  drawing.text(249, 310, "outside", Drawing::Anchor::kStart, "small");
  figure.body = drawing.body();
  figure.description = f8::format(
      "Layers (N, K) are left out one by one, and the estimator says their speedups from the "
      "others, on {}. {} of {} measured speedups ({}) are inside their interval.",
      figure.device, covered, rows.size(),
      percent(static_cast<double>(covered) / static_cast<double>(rows.size())));
  return figure;
}

}  // namespace f8::report
