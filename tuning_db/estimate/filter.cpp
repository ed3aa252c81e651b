// The auto filter's verdicts: see filter.hpp. How a speedup is estimated is surface.cpp's part.
#include "tuning_db/estimate/filter.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/text.hpp"
#include "recipes/model/model_mlps.hpp"

namespace f8::tuning_db {

// `kind`: the option that says what the shapes are of, with a space behind it; empty: of linears.
static std::string how_to_measure(const Recipe& recipe, std::string_view kind,
                                  std::span<const Shape> shapes, const Groups& groups) {
  const std::string label = settings_label(recipe);
  if (!find_recipe(label)) return "only named recipes are measured";
  std::string mnk;
  for (const Shape& s : shapes) {
    mnk += f8::format("{}{},{},{}", mnk.empty() ? "" : ";", s.m, s.n, s.k);
  }
  const char* quotes = shapes.size() > 1 ? "\"" : "";  // a shell takes ; for its own
  std::string of_groups;
  if (groups.experts > 0) {
    of_groups = f8::format(" --experts {} --skew {}", groups.experts, groups.skew);
  }
  return f8::format("measure it with `float8-tune sweep {}--mnk {}{}{}{} --recipe {}`", kind,
                    quotes, mnk, quotes, of_groups, label);
}

std::string how_to_measure(const Recipe& recipe, std::span<const Shape> shapes,
                           const Groups& groups) {
  return how_to_measure(recipe, "", shapes, groups);
}

std::string how_to_measure(const Recipe& recipe, const MlpShape& mlp) {
  const Shape shape = mlp;
  return how_to_measure(recipe, mlp.gate ? "--mlp gated " : "--mlp plain ", std::span(&shape, 1),
                        mlp.groups);
}

namespace {

// The shape of a linear or, with the hidden features as n, of the MLP of experts.
Shape shape_of(const NamedLinear& layer, int64_t rows) {
  return {rows, layer.out_features, layer.in_features};
}

std::string how_to_measure_layer(const Recipe& recipe, const NamedLinear& layer, int64_t rows) {
  const Shape shape = shape_of(layer, rows);
  if (layer.is_experts()) return how_to_measure(recipe, MlpShape{shape, true, layer.groups});
  return how_to_measure(recipe, std::span(&shape, 1), Groups());
}

std::string unknown_reason(const NamedLinear& layer, int64_t rows, const Estimator& estimator) {
  return f8::format(
      "kept in bf16: {}; {}",
      estimator.empty()
          ? f8::format("there are no measurements of recipe {}{}{}", describe(estimator.recipe()),
                       estimator.device().empty() ? "" : " on ", estimator.device())
          : std::string("the measured shapes are too few to say anything of this one"),
      how_to_measure_layer(estimator.recipe(), layer, rows));
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
  if (!kept_by_name_or_size({}, d.layer).empty()) {
    d.parts.clear();
    return;
  }
  d.speedup = e->speedup;
  d.lo = e->lo;
  d.hi = e->hi;
  d.terms = e->terms;
  d.device = e->device;
  for (const LinearSpeedup* row : e->rows) d.trial_uuids.push_back(row->trial);
  if (!wire || d.layer.is_experts()) return;
  const WiredSpeedup wired = wire->speedup(i, {d.speedup, d.lo, d.hi}, e->evidence, e->bf16_ns);
  d.speedup = wired.speedup.speedup;
  d.lo = wired.speedup.lo;
  d.hi = wired.speedup.hi;
  d.bf16_ns = wired.bf16_ns;
  d.wire = wired.share;
}

// The speedup of what runs one after the other: times add up, and so do the ends of their intervals.
class TimesTogether {
 public:
  void add(double bf16_ns, const SpeedupInterval& speedup) {
    bf16_ns_ += bf16_ns;
    fp8_ns_ += bf16_ns / speedup.speedup;
    most_ns_ += bf16_ns / speedup.lo;
    least_ns_ += bf16_ns / speedup.hi;
  }
  [[nodiscard]] double bf16_ns() const { return bf16_ns_; }
  [[nodiscard]] SpeedupInterval speedup() const {
    return {rounded(bf16_ns_ / fp8_ns_), rounded(bf16_ns_ / most_ns_),
            rounded(bf16_ns_ / least_ns_)};
  }

 private:
  double bf16_ns_ = 0, fp8_ns_ = 0, most_ns_ = 0, least_ns_ = 0;
};

// The layer's two expert linears as one: nothing where nothing is known of one of them.
std::optional<Estimate> add_up(FilterDecision& d, int64_t rows, Estimates& estimates) {
  Estimate all;
  TimesTogether times;
  for (const ExpertLinear& linear : expert_linears(d.layer, rows)) {
    const std::optional<Estimate>& e = estimates(linear.shape);
    if (!e) {
      d.parts.clear();
      return std::nullopt;
    }
    d.parts.push_back({linear, e->evidence, {e->speedup, e->lo, e->hi}, e->bf16_ns});
    all.evidence = std::max(all.evidence, e->evidence);
    times.add(e->bf16_ns, {e->speedup, e->lo, e->hi});
    for (double IntervalTerms::*term : {&IntervalTerms::rows, &IntervalTerms::shape,
                                        &IntervalTerms::device, &IntervalTerms::toolchain}) {
      all.terms.*term = std::max(all.terms.*term, e->terms.*term);
    }
    std::string_view before = all.basis;
    const bool same = take_off_end(before, ", " + e->basis);
    all.basis = f8::format("{}{}{} {:.3f}, {}", before,
                           before.empty() ? ""
                           : same         ? " and "
                                          : "; ",
                           linear.name, e->speedup, e->basis);
    all.rows.insert(all.rows.end(), e->rows.begin(), e->rows.end());
    if (!all.device.contains(e->device)) {
      all.device += (all.device.empty() ? "" : ", ") + e->device;
    }
  }
  all.bf16_ns = times.bf16_ns();
  const SpeedupInterval together = times.speedup();
  all.speedup = together.speedup;
  all.lo = together.lo;
  all.hi = together.hi;
  return all;
}

// The estimators of the experts and MLPs of a model, by how many experts there are and how skewed they are. It keeps
// few, as Estimates do.
class GroupEstimates {
 public:
  static constexpr size_t kMostKinds = 16;
  explicit GroupEstimates(const Estimator& linears) : linears_(linears) {}
  [[nodiscard]] Estimates& of_experts(const Groups& groups) {
    return of(groups, {}, [&] { return linears_.of_experts(groups); });
  }
  [[nodiscard]] Estimates& of_mlps(bool gate, const Groups& groups) {
    return of(groups, gate, [&] { return linears_.of_mlps(gate, groups); });
  }

 private:
  struct Known {
    explicit Known(Estimator own) : estimator(std::move(own)), estimates(estimator) {}
    Estimator estimator;
    Estimates estimates;
  };
  template <class Make>
  Estimates& of(const Groups& groups, std::optional<bool> gate, const Make& make) {
    const std::pair kind(groups, gate);
    const auto found = known_.find(kind);
    if (found != known_.end()) return found->second->estimates;
    if (known_.size() == kMostKinds) known_.clear();
    return known_.emplace(kind, std::make_unique<Known>(make())).first->second->estimates;
  }

  const Estimator& linears_;
  std::map<std::pair<Groups, std::optional<bool>>, std::unique_ptr<Known>> known_;
};

// What is measured of MLPs with this one's linears, or experts: nothing where there are no rows.
std::optional<Estimate> of_mlp(const MlpShape& mlp, GroupEstimates& groups) {
  std::optional<Estimate> e = groups.of_mlps(mlp.gate, mlp.groups)(mlp);
  if (e) {
    e->basis = f8::format("{} as a whole, {}",
                          mlp.groups.experts > 0 ? "the experts' MLP" : "its MLP", e->basis);
  }
  return e;
}

// Weaker evidence of the whole is no reason to leave stronger one of its parts.
bool is_as_good(const Estimate& whole, const std::optional<Estimate>& parts) {
  return !parts || whole.evidence <= parts->evidence;
}

// The MLPs that will be fused: those of which no linear is kept by its name or its sizes.
std::vector<ModelMlp> fused_mlps(std::span<const NamedLinear> layers, const FilterOptions& options,
                                 const NameFilter& names, const Recipe& recipe) {
  if (!options.fused_mlps || !recipe.is_fp8_throughout()) return {};
  std::vector<ModelMlp> mlps = mlps_of(layers);
  std::erase_if(mlps, [&](const ModelMlp& mlp) {
    return !std::ranges::all_of(
        mlp.linears, [&](size_t i) { return kept_by_name_or_size(names, layers[i]).empty(); });
  });
  return mlps;
}

// By layer: the estimate of the MLP that it is a linear of, with its share of the time.
std::vector<std::optional<Estimate>> of_fused_mlps(std::span<const NamedLinear> layers,
                                                   std::span<const ModelMlp> mlps,
                                                   const FilterOptions& options, Estimates& linears,
                                                   GroupEstimates& groups) {
  std::vector<std::optional<Estimate>> all(layers.size());
  for (const ModelMlp& mlp : mlps) {
    const int64_t rows = tokens_of(layers[mlp.linears.front()], options.tokens);
    std::optional<Estimate> e = of_mlp({{rows, mlp.hidden, mlp.features}, mlp.gate, {}}, groups);
    const auto is_better_than = [&](size_t i) {
      return is_as_good(*e, linears(shape_of(layers[i], rows)));
    };
    if (!e || !std::ranges::all_of(mlp.linears, is_better_than)) continue;
    // A linear has its share of the products.
    const double of_product = e->bf16_ns / (mlp.gate ? 3 : 2);
    for (const size_t i : mlp.linears) {
      const NamedLinear& one = layers[i];
      e->bf16_ns = of_product * static_cast<double>(one.in_features * one.out_features) /
                   static_cast<double>(mlp.hidden * mlp.features);
      all[i] = e;
    }
  }
  return all;
}

struct Question {
  const FilterOptions& options;
  const NameFilter& names;
  const Estimator& estimator;
  const std::optional<WireCost>& wire;
};

FilterDecision decide(const NamedLinear& layer, size_t i, const Question& asked,
                      const std::optional<Estimate>& fused, Estimates& linears,
                      GroupEstimates& groups) {
  const FilterOptions& options = asked.options;
  const int64_t rows = tokens_of(layer, options.tokens);
  FilterDecision d{.layer = layer, .reason = kept_by_name_or_size(asked.names, layer)};
  std::optional<Estimate> whole = fused;
  if (layer.is_experts()) {
    whole = of_mlp({shape_of(layer, rows), true, layer.groups}, groups);
    std::optional<Estimate> parts = add_up(d, rows, groups.of_experts(layer.groups));
    if (whole && is_as_good(*whole, parts)) {
      d.parts.clear();
    } else {
      whole = std::move(parts);
    }
  }
  const std::optional<Estimate>& e =
      whole || layer.is_experts() ? whole : linears(shape_of(layer, rows));
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
    d.reason = unknown_reason(layer, rows, asked.estimator);
  } else {
    d.evidence = d.wire ? Evidence::kModelled : e->evidence;
    std::string basis = basis_of(*e, d, asked.wire);
    if (!d.parts.empty() && e->evidence != Evidence::kMeasured) {
      basis += "; " + how_to_measure_layer(asked.estimator.recipe(), layer, rows);
    }
    Verdict verdict = speedup_verdict({d.speedup, d.lo, d.hi}, options.margin, basis);
    d.convert = verdict.convert;
    d.reason = std::move(verdict.reason);
  }
  return d;
}

// Gives the linears of a fused MLP one verdict where the rule gave them several: by their times together. A part of an
// MLP in fp8 would not be fused.
void settle(const ModelMlp& mlp, const FilterOptions& options,
            std::vector<FilterDecision>& decisions) {
  TimesTogether times;
  std::string each;
  bool differ = false;
  for (const size_t i : mlp.linears) {
    const FilterDecision& d = decisions[i];
    if (d.evidence == Evidence::kRule || d.bf16_ns <= 0) return;
    times.add(d.bf16_ns, {d.speedup, d.lo, d.hi});
    each += f8::format("{}{} {:.3f}", each.empty() ? "" : ", ",
                       d.layer.fqn.substr(d.layer.fqn.rfind('.') + 1), d.speedup);
    differ = differ || d.convert != decisions[mlp.linears.front()].convert;
  }
  if (!differ) return;
  const Verdict verdict = speedup_verdict(times.speedup(), options.margin,
                                          f8::format("the linears of its MLP together, {}", each));
  for (const size_t i : mlp.linears) {
    decisions[i].convert = verdict.convert;
    decisions[i].reason = verdict.reason;
  }
}

// All layers together. A layer without an estimate counts with its share of the work.
double model_speedup(const std::vector<FilterDecision>& decisions) {
  const auto flops = [](const FilterDecision& d) {
    return (d.layer.is_experts() ? 3 : 1) * static_cast<double>(d.layer.in_features) *
           static_cast<double>(d.layer.out_features) * static_cast<double>(d.layer.count) *
           d.layer.tokens_share;
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
  return rounded(before / after);
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
  Estimates linears(estimator);
  GroupEstimates groups(estimator);
  const std::vector<ModelMlp> mlps = fused_mlps(layers, options, names, estimator.recipe());
  const auto fused = of_fused_mlps(layers, mlps, options, linears, groups);
  result.mlps.all = mlps.size();
  result.mlps.as_wholes = static_cast<size_t>(std::ranges::count_if(
      mlps, [&](const ModelMlp& mlp) { return fused[mlp.linears.front()].has_value(); }));
  const Question asked{options, names, estimator, result.wire};
  result.decisions.reserve(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    result.decisions.push_back(decide(layers[i], i, asked, fused[i], linears, groups));
  }
  for (const ModelMlp& mlp : mlps) settle(mlp, options, result.decisions);
  result.estimated_model_speedup = model_speedup(result.decisions);
  return result;
}

}  // namespace f8::tuning_db
