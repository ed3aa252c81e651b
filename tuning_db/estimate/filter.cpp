// The auto filter's verdicts: see filter.hpp. How a speedup is estimated is surface.cpp's part.
#include "tuning_db/estimate/filter.hpp"

#include <cmath>
#include <map>
#include <optional>
#include <utility>

namespace f8::tuning_db {
namespace {

std::string sweep_command(std::string_view recipe, Shape s) {
  return f8::format("float8-tune sweep --mnk {},{},{} --recipe {} --op linear", s.m, s.n, s.k,
                    recipe);
}

void decide_measured(FilterDecision& d, const std::optional<Estimate>& e, Shape shape,
                     double margin, const Estimator& estimator) {
  if (!e) {
    d.reason = f8::format(
        "kept in bf16: {}; measure it with `{}`",
        estimator.empty()
            ? f8::format("there are no measurements of recipe {}{}{}", estimator.recipe(),
                         estimator.device().empty() ? "" : " on ", estimator.device())
            : std::string("the measured shapes are too few to say anything of this one"),
        sweep_command(estimator.recipe(), shape));
    return;
  }
  d.evidence = e->evidence;
  Verdict verdict = speedup_verdict({e->speedup, e->lo, e->hi}, margin,
                                    f8::format("{} {}", e->basis, estimator.describe_source(*e)));
  d.convert = verdict.convert;
  d.reason = std::move(verdict.reason);
}

// Many layers of a model have one shape, whose estimate is made once.
class Estimates {
 public:
  explicit Estimates(const Estimator& estimator) : estimator_(estimator) {}
  const std::optional<Estimate>& operator()(Shape shape) {
    const auto [at, is_new] = known_.try_emplace(shape);
    if (is_new) at->second = estimator_.estimate(shape);
    return at->second;
  }

 private:
  const Estimator& estimator_;
  std::map<Shape, std::optional<Estimate>> known_;
};

FilterDecision decide(const NamedLinear& layer, const FilterOptions& options,
                      const NameFilter& names, const Estimator& estimator, Estimates& estimates) {
  const Shape shape{options.tokens, layer.out_features, layer.in_features};
  const std::optional<Estimate>& e = estimates(shape);
  FilterDecision d{.layer = layer, .reason = kept_by_name_or_size(names, layer)};
  if (e) d.bf16_ns = e->bf16_ns;
  if (e && kept_by_name_or_size({}, layer).empty()) {
    d.speedup = e->speedup;
    d.lo = e->lo;
    d.hi = e->hi;
    for (const LinearSpeedup* row : e->rows) d.trial_uuids.push_back(row->trial);
  }
  if (!d.reason.empty()) return d;
  if (!names.automatic && !options.automatic) {
    d.convert = true;
    d.reason = f8::format("converted: its name and sizes allow it, and {} is not among the names",
                          kAutoFlag);
  } else if (options.policy == FilterPolicy::kMeasured) {
    decide_measured(d, e, shape, options.margin, estimator);
  } else {
    Verdict verdict = torchao_verdict(estimator.recipe(), layer);
    d.convert = verdict.convert;
    d.reason = std::move(verdict.reason);
  }
  return d;
}

// All layers together. A layer without an estimate counts with its share of the work.
double model_speedup(const std::vector<FilterDecision>& decisions) {
  const auto flops = [](const FilterDecision& d) {
    return static_cast<double>(d.layer.in_features) * static_cast<double>(d.layer.out_features) *
           static_cast<double>(d.layer.count);
  };
  double known_ns = 0;
  double known_flops = 0;
  for (const FilterDecision& d : decisions) {
    if (d.bf16_ns <= 0) continue;
    known_ns += d.bf16_ns * static_cast<double>(d.layer.count);
    known_flops += flops(d);
  }
  if (known_flops == 0) return 1;
  double before = 0;
  double after = 0;
  for (const FilterDecision& d : decisions) {
    const double ns = d.bf16_ns > 0 ? d.bf16_ns * static_cast<double>(d.layer.count)
                                    : flops(d) * known_ns / known_flops;
    before += ns;
    after += d.convert ? ns / d.speedup : ns;
  }
  return std::round(before / after * 1e4) / 1e4;
}

}  // namespace

Result<FilterResult> filter(std::span<const NamedLinear> layers, const FilterOptions& options,
                            const Estimator& estimator) {
  F8_TRY(check_filter(layers, options.tokens, options.margin));
  const NameFilter names = F8_TRY(name_filter(options.filter_fqns));
  if (options.policy == FilterPolicy::kTorchao && (names.automatic || options.automatic)) {
    F8_TRY(check_torchao_rule(estimator.recipe()));
  }
  FilterResult result;
  result.device = estimator.device();
  Estimates estimates(estimator);
  for (const NamedLinear& layer : layers) {
    result.decisions.push_back(decide(layer, options, names, estimator, estimates));
  }
  result.estimated_model_speedup = model_speedup(result.decisions);
  return result;
}

}  // namespace f8::tuning_db
