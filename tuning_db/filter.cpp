// The auto filter's verdicts: see filter.hpp. How a speedup is estimated is surface.cpp's part.
#include "tuning_db/filter.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "tuning_db/evidence.hpp"
#include "tuning_db/torchao_rule.hpp"

namespace f8::tuning_db {
namespace {

constexpr int64_t kAlignment = 16;  // of K and N, from the tensor core's fp8 operands

Status validate(std::span<const NamedLinear> layers, const FilterOptions& options) {
  if (options.tokens < 1 || options.tokens > kMaxDim) {
    return fail(ErrorCode::kInvalidArgument, "tokens is {}; it must be 1 to {}", options.tokens,
                kMaxDim);
  }
  if (!(options.margin >= 0 && options.margin < 10)) {
    return fail(ErrorCode::kInvalidArgument, "margin is {}; it must be 0 or more, e.g. 0.02",
                options.margin);
  }
  for (const NamedLinear& layer : layers) {
    const auto out_of_range = [](int64_t v) { return v < 1 || v > kMaxDim; };
    if (out_of_range(layer.in_features) || out_of_range(layer.out_features) || layer.count < 1) {
      return fail(ErrorCode::kInvalidArgument,
                  "layer {}: in_features {}, out_features {}, count {}; all must be 1 or more",
                  layer.fqn, layer.in_features, layer.out_features, layer.count);
    }
  }
  return {};
}

// Why a layer is kept whatever its speed; empty: it may be converted. In the peer's order.
std::string kept_by_rule(const NamedLinear& layer, const FilterOptions& options) {
  for (const std::string& name : options.filter_fqns) {
    if (name != kAutoFlag && layer.fqn.find(name) != std::string::npos) {
      return fmt::format("kept in bf16: its name holds \"{}\" of filter_fqns", name);
    }
  }
  for (const auto& [what, value] : {std::pair("K (in_features)", layer.in_features),
                                    std::pair("N (out_features)", layer.out_features)}) {
    if (value % kAlignment != 0) {
      return fmt::format("kept in bf16: {} {} is not a multiple of {}", what, value, kAlignment);
    }
  }
  return {};
}

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
  const double need = 1 + options.margin;
  d.evidence = e->evidence;
  d.convert = e->lo > need;
  const char* verdict = d.convert      ? "converted"
                        : e->hi > need ? "ambiguous, kept in bf16"
                                       : "kept in bf16";
  d.reason = fmt::format("{}: speedup {:.3f} [{:.3f}, {:.3f}], need > {:.4g}; {} {}", verdict,
                         e->speedup, e->lo, e->hi, need, e->basis, describe_source(*e));
}

void decide_torchao(FilterDecision& d, const Recipe& recipe, bool automatic) {
  if (!automatic) {
    d.convert = true;
    d.reason =
        fmt::format("converted: torchao without {} asks no more than multiples of 16", kAutoFlag);
    return;
  }
  const std::string keeps = torchao_keeps(recipe.name, d.layer.in_features, d.layer.out_features);
  d.convert = keeps.empty();
  d.reason = d.convert ? fmt::format("converted: K and N are above the limits of torchao's {} rule",
                                     recipe.name)
                       : fmt::format("kept in bf16 by torchao's {} rule: {}", recipe.name, keeps);
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

Result<Policy> parse_policy(std::string_view text) {
  if (text == "measured") return Policy::kMeasured;
  if (text == "torchao") return Policy::kTorchao;
  return fail(ErrorCode::kInvalidArgument, "policy '{}'; use measured or torchao", text);
}

std::string_view to_string(Policy p) {
  return p == Policy::kMeasured ? "measured" : "torchao";
}

std::string_view to_string(Evidence e) {
  switch (e) {
    case Evidence::kMeasured:
      return "measured";
    case Evidence::kInterpolated:
      return "interpolated";
    case Evidence::kModelled:
      return "modelled";
    case Evidence::kRule:
      break;
  }
  return "rule";
}

Result<FilterResult> filter(std::span<const NamedLinear> layers, const Recipe& recipe,
                            const FilterOptions& options, std::span<const Database* const> dbs) {
  F8_TRY(validate(layers, options));
  const bool automatic =
      std::ranges::find(options.filter_fqns, kAutoFlag) != options.filter_fqns.end();
  if (options.policy == Policy::kTorchao && automatic && !torchao_has_rule(recipe.name)) {
    return fail(ErrorCode::kInvalidArgument,
                "torchao has no {} rule for recipe {}; use policy measured, or leave the flag out",
                kAutoFlag, recipe.name);
  }
  const Evidences evidences = F8_TRY(Evidences::gather(recipe.name, options.device, dbs));
  FilterResult result;
  result.device = evidences.empty() ? options.device : evidences.device();
  std::vector<double> bf16_ns;
  for (const NamedLinear& layer : layers) {
    const Shape shape{options.tokens, layer.out_features, layer.in_features};
    const std::optional<Estimate> e = evidences.estimate(shape);
    FilterDecision d{.layer = layer, .reason = kept_by_rule(layer, options), .trial_uuids = {}};
    const bool aligned =
        layer.in_features % kAlignment == 0 && layer.out_features % kAlignment == 0;
    if (e && aligned) {
      d.speedup = e->speedup;
      d.lo = e->lo;
      d.hi = e->hi;
      for (const SpeedPoint* p : e->evidence_points) d.trial_uuids.push_back(p->row.uuid);
    }
    if (d.reason.empty()) {
      if (options.policy == Policy::kMeasured) {
        decide_measured(d, e, recipe, shape, options, evidences);
      } else {
        decide_torchao(d, recipe, automatic);
      }
    }
    bf16_ns.push_back(e ? e->bf16_ns : 0);
    result.decisions.push_back(std::move(d));
  }
  result.estimated_model_speedup = model_speedup(result, bf16_ns);
  return result;
}

}  // namespace f8::tuning_db
