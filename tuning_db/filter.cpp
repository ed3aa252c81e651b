// The auto filter's verdicts: see filter.hpp. How a speedup is estimated is surface.cpp's part.
#include "tuning_db/filter.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "tuning_db/evidence.hpp"

namespace f8::tuning_db {
namespace {

std::string describe_source(const Estimate& e) {
  const TrialRow& row = e.evidence_points.front()->row;
  return fmt::format("({}, {} W; {}; {})", row.device_name, row.device.power_limit_w,
                     row.at.substr(0, 10), row.layer);
}

std::string sweep_command(const Recipe& recipe, Shape s) {
  return fmt::format("float8-tune sweep --mnk {},{},{} --recipe {} --op linear", s.m, s.n, s.k,
                     recipe.name);
}

void decide_measured(FilterDecision& d, const std::optional<Estimate>& e, const Recipe& recipe,
                     Shape shape, const FilterOptions& options, const Evidences& evidences) {
  if (!e) {
    d.reason = fmt::format(
        "kept in bf16: {}; measure it with `{}`",
        evidences.empty()
            ? fmt::format("there are no measurements of recipe {}{}{}", recipe.name,
                          options.device.empty() ? "" : " on ", options.device)
            : std::string("the measured shapes are too few to say anything of this one"),
        sweep_command(recipe, shape));
    return;
  }
  d.evidence = e->evidence;
  const Verdict verdict = speedup_verdict({e->speedup, e->lo, e->hi}, options.margin,
                                          fmt::format("{} {}", e->basis, describe_source(*e)));
  d.convert = verdict.convert;
  d.reason = verdict.reason;
}

void decide_torchao(FilterDecision& d, const Recipe& recipe, bool automatic) {
  if (!automatic) {
    d.convert = true;
    d.reason =
        fmt::format("converted: torchao without {} asks no more than multiples of 16", kAutoFlag);
    return;
  }
  const Verdict verdict = torchao_verdict(recipe.name, d.layer);
  d.convert = verdict.convert;
  d.reason = verdict.reason;
}

// Of all layers together. A layer without an estimate counts with its share of the work.
double model_speedup(const FilterResult& result, const std::vector<double>& bf16_ns) {
  const auto flops = [](const FilterDecision& d) {
    return static_cast<double>(d.layer.in_features) * static_cast<double>(d.layer.out_features) *
           static_cast<double>(d.layer.count);
  };
  double known_ns = 0;
  double known_flops = 0;
  for (size_t i = 0; i < bf16_ns.size(); ++i) {
    if (bf16_ns[i] <= 0) continue;
    known_ns += bf16_ns[i] * static_cast<double>(result.decisions[i].layer.count);
    known_flops += flops(result.decisions[i]);
  }
  if (known_flops == 0) return 1;
  double before = 0;
  double after = 0;
  for (size_t i = 0; i < bf16_ns.size(); ++i) {
    const FilterDecision& d = result.decisions[i];
    const double ns = bf16_ns[i] > 0 ? bf16_ns[i] * static_cast<double>(d.layer.count)
                                     : flops(d) * known_ns / known_flops;
    before += ns;
    after += d.convert ? ns / d.speedup : ns;
  }
  return std::round(before / after * 1e4) / 1e4;
}

}  // namespace

Result<FilterResult> filter(std::span<const NamedLinear> layers, const Recipe& recipe,
                            const FilterOptions& options, std::span<const Database* const> dbs) {
  F8_TRY(check_filter(layers, options.tokens, options.margin));
  const NameFilter names = F8_TRY(name_filter(options.filter_fqns));
  if (options.policy == FilterPolicy::kTorchao && names.automatic) {
    F8_TRY(check_torchao_rule(recipe.name));
  }
  const Evidences evidences = F8_TRY(Evidences::gather(recipe.name, options.device, dbs));
  FilterResult result;
  result.device = evidences.empty() ? options.device : evidences.device();
  std::vector<double> bf16_ns;
  for (const NamedLinear& layer : layers) {
    const Shape shape{options.tokens, layer.out_features, layer.in_features};
    const std::optional<Estimate> e = evidences.estimate(shape);
    FilterDecision d{
        .layer = layer, .reason = kept_by_name_or_size(names, layer), .trial_uuids = {}};
    if (e && kept_by_name_or_size({}, layer).empty()) {
      d.speedup = e->speedup;
      d.lo = e->lo;
      d.hi = e->hi;
      for (const SpeedPoint* p : e->evidence_points) d.trial_uuids.push_back(p->row.uuid);
    }
    if (d.reason.empty()) {
      if (options.policy == FilterPolicy::kMeasured) {
        decide_measured(d, e, recipe, shape, options, evidences);
      } else {
        decide_torchao(d, recipe, names.automatic);
      }
    }
    bf16_ns.push_back(e ? e->bf16_ns : 0);
    result.decisions.push_back(std::move(d));
  }
  result.estimated_model_speedup = model_speedup(result, bf16_ns);
  return result;
}

}  // namespace f8::tuning_db
