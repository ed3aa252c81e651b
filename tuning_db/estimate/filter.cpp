// The auto filter's verdicts: see filter.hpp. How a speedup is estimated is surface.cpp's part.
#include "tuning_db/estimate/filter.hpp"

#include <cmath>
#include <optional>
#include <utility>

namespace f8::tuning_db {
namespace {

// The tool measures named recipes.
std::string how_to_measure(const Recipe& recipe, Shape s) {
  const std::string label = settings_label(recipe);
  if (!find_recipe(label)) return "only named recipes are measured";
  return f8::format("measure it with `float8-tune sweep --mnk {},{},{} --recipe {}`", s.m, s.n, s.k,
                    label);
}

std::string unknown_reason(Shape shape, const Estimator& estimator) {
  return f8::format(
      "kept in bf16: {}; {}",
      estimator.empty()
          ? f8::format("there are no measurements of recipe {}{}{}", describe(estimator.recipe()),
                       estimator.device().empty() ? "" : " on ", estimator.device())
          : std::string("the measured shapes are too few to say anything of this one"),
      how_to_measure(estimator.recipe(), shape));
}

// What a verdict rests on: the rows, and the wire where there is one.
std::string basis_of(const Estimate& e, const FilterDecision& d,
                     const std::optional<WireCost>& wire) {
  if (!wire || !d.wire) return e.basis;
  const WireShare& share = *d.wire;
  return f8::format(
      "{:.3f} [{:.3f}, {:.3f}] without the wire, which takes {:.1f} us in bf16 and {:.1f} in fp8, "
      "{:.1f} and {:.1f} of it exposed; {}; {}",
      share.compute.speedup, share.compute.lo, share.compute.hi, share.bf16_us, share.fp8_us,
      share.bf16_exposed_us, share.fp8_exposed_us, wire->describe(), e.basis);
}

// The speedup of the i-th layer, if anything is known of its shape.
void estimate(FilterDecision& d, size_t i, const std::optional<Estimate>& e,
              const std::optional<WireCost>& wire) {
  if (!e) return;
  d.bf16_ns = e->bf16_ns;
  if (!kept_by_name_or_size({}, d.layer).empty()) return;
  d.speedup = e->speedup;
  d.lo = e->lo;
  d.hi = e->hi;
  d.terms = e->terms;
  for (const LinearSpeedup* row : e->rows) d.trial_uuids.push_back(row->trial);
  if (!wire) return;
  const WiredSpeedup wired = wire->speedup(i, {d.speedup, d.lo, d.hi}, e->evidence, e->bf16_ns);
  d.speedup = wired.speedup.speedup;
  d.lo = wired.speedup.lo;
  d.hi = wired.speedup.hi;
  d.bf16_ns = wired.bf16_ns;
  d.wire = wired.share;
}

struct Question {
  const FilterOptions& options;
  const NameFilter& names;
  const Estimator& estimator;
  const std::optional<WireCost>& wire;
};

FilterDecision decide(const NamedLinear& layer, size_t i, const Question& asked,
                      Estimates& estimates) {
  const FilterOptions& options = asked.options;
  const Shape shape{tokens_of(layer, options.tokens), layer.out_features, layer.in_features};
  const std::optional<Estimate>& e = estimates(shape);
  FilterDecision d{.layer = layer, .reason = kept_by_name_or_size(asked.names, layer)};
  estimate(d, i, e, asked.wire);
  if (d.reason.empty() && asked.wire) d.reason = asked.wire->kept(i);
  if (!d.reason.empty()) return d;
  if (!asked.names.automatic && !options.automatic) {
    d.convert = true;
    d.reason = f8::format("converted: its name and sizes allow it, and {} is not among the names",
                          kAutoFlag);
  } else if (options.policy == FilterPolicy::kTorchao) {
    Verdict verdict = torchao_verdict(asked.estimator.recipe(), layer);
    d.convert = verdict.convert;
    d.reason = std::move(verdict.reason);
  } else if (!e) {
    d.reason = unknown_reason(shape, asked.estimator);
  } else {
    d.evidence = d.wire ? Evidence::kModelled : e->evidence;
    Verdict verdict =
        speedup_verdict({d.speedup, d.lo, d.hi}, options.margin, basis_of(*e, d, asked.wire));
    d.convert = verdict.convert;
    d.reason = std::move(verdict.reason);
  }
  return d;
}

// All layers together. A layer without an estimate counts with its share of the work.
double model_speedup(const std::vector<FilterDecision>& decisions) {
  const auto flops = [](const FilterDecision& d) {
    return static_cast<double>(d.layer.in_features) * static_cast<double>(d.layer.out_features) *
           static_cast<double>(d.layer.count) * d.layer.tokens_share;
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
  if (options.parallel.is_given()) {  // also of one rank, to check what is given
    result.wire = F8_TRY(WireCost::create(layers, options.tokens, estimator.recipe(),
                                          options.parallel, options.wire));
  }
  if (options.parallel.ranks() == 1) result.wire.reset();
  Estimates estimates(estimator);
  const Question asked{options, names, estimator, result.wire};
  result.decisions.reserve(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    result.decisions.push_back(decide(layers[i], i, asked, estimates));
  }
  result.estimated_model_speedup = model_speedup(result.decisions);
  return result;
}

}  // namespace f8::tuning_db
