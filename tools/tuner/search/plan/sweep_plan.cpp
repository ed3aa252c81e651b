#include "tools/tuner/search/plan/sweep_plan.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/hash.hpp"
#include "base/text.hpp"
#include "codegen/emit.hpp"
#include "tools/tuner/search/device_profile.hpp"

namespace f8::tuner {
namespace {

// The hashes of kernels' sources; each is emitted once.
class SourceHashes {
 public:
  Result<std::string> of(const codegen::KernelSpec& spec) {
    const std::string key = codegen::key(spec);
    if (const auto found = known_.find(key); found != known_.end()) return found->second;
    const codegen::KernelSource source = F8_TRY(codegen::emit(spec));
    std::string text = source.source;
    for (const std::string& option : source.options) text += "\n" + option;
    return known_[key] = hash_hex(text);
  }

 private:
  std::map<std::string, std::string> known_;
};

double screen_s(const SweepOptions& options, int candidates, double one_s) {
  // A candidate takes at least two batches, whatever its share.
  return candidates * (std::max(options.screen_ms / 1e3, 2 * one_s) + 2 * one_s + kCandidateS);
}

class Planner {
 public:
  Planner(const SweepRequest& request, const runtime::DeviceInfo& device, const AskSuggestions& ask)
      : request_(request),
        options_(request.options),
        device_(device),
        profile_(profile_of(device)),
        ask_(ask) {}

  Status add(const Recipe& recipe, const SweptShape& shape) {
    PlannedLinear linear;
    linear.problem = F8_TRY(Problem::make(Op::kLinear, recipe, shape, shape.groups));
    const std::string key = linear.problem.key();
    if (request_.skipped.contains(key) || !planned_.insert(key).second) return {};
    for (const Gemm g : kGemms) {
      const PlannedGemm& gemm = linear.gemms.emplace_back(F8_TRY(plan_gemm(recipe, g, shape)));
      F8_TRY(add_trials(gemm));
      for (const bool bf16 : {false, true}) linear.predicted_s += gemm_s(gemm, bf16);
    }
    for (const Impl impl : {Impl::kFloat8, Impl::kBf16}) add_trial(linear.problem, {impl}, "");
    if (is_grouped(linear.problem.op)) {
      linear.baseline = F8_TRY(expert_baseline(linear.problem, device_, request_.prior));
    }
    linear.predicted_s += linear_s(shape, linear.baseline.has_value());
    take(std::move(linear));
    return {};
  }
  // The MLP, and its linears where their kernels are not known.
  Status add_mlp(const Recipe& recipe, const MlpShape& shape) {
    PlannedLinear mlp;
    mlp.problem = F8_TRY(Problem::make(Op::kMlp, recipe, to_dims(shape)));
    const std::string key = mlp.problem.key();
    if (request_.skipped.contains(key) || !planned_.insert(key).second) return {};
    const std::vector<Shape> linears = f8::linears_of(shape);
    if (const auto known = request_.mlp_kernels.find(key); known != request_.mlp_kernels.end()) {
      mlp.mlp = known->second;
      mlp.kernels = F8_TRY(gemm_kernels(mlp.problem, known->second));
    } else {
      for (const Shape& linear : {linears.front(), linears.back()}) {
        F8_TRY(add(recipe, {linear, shape.groups}));
      }
    }
    for (const Impl impl : {Impl::kFloat8, Impl::kBf16}) add_trial(mlp.problem, {impl}, "");
    for (const Shape& linear : linears) mlp.predicted_s += pair_s(linear);
    mlp.predicted_s = compared_s(mlp.predicted_s);
    take(std::move(mlp));
    return {};
  }
  void add_attention(const Problem& operation) {
    if (request_.skipped.contains(operation.key())) return;
    plan_.trials.push_back(attention_trial(operation));
    if (operation.op == Op::kAttention) plan_.trials.push_back(bf16_attention_trial(operation));
    take({.problem = operation,
          .baseline = {},
          .kernels = attention_kernels(attention_recipe(operation), attention_shape(operation)),
          .predicted_s = tuner::predicted_s(operation, attention_method(request_))});
  }
  SweepPlan plan() { return std::move(plan_); }

 private:
  void take(PlannedLinear linear) {
    plan_.predicted_s += linear.predicted_s;
    plan_.linears.push_back(std::move(linear));
  }

  Result<Suggested> suggested(const Problem& problem, bool bf16) {
    if (is_grouped(problem.op)) return suggested_of_groups(bf16);
    const std::string identity = gemm_identity(problem, bf16);
    if (const auto found = suggested_.find(identity); found != suggested_.end()) {
      return found->second;
    }
    return suggested_[identity] = F8_TRY(ask_(problem, bf16));
  }

  // The first that cuBLASLt has, and the one that a plan takes.
  std::vector<int> measured(const Suggested& suggested) const {
    std::vector<int> all;
    for (int i = 0; i < std::min(suggested.count, options_.heuristics); ++i) all.push_back(i);
    if (!all.empty() && suggested.unmeasured > all.back()) all.push_back(suggested.unmeasured);
    return all;
  }

  Result<PlannedGemm> plan_gemm(const Recipe& recipe, Gemm g, const SweptShape& shape) {
    PlannedGemm gemm;
    gemm.problem = F8_TRY(Problem::make(to_op(g), recipe, shape, shape.groups));
    const Suggested bf16 = F8_TRY(suggested(gemm.problem, true));
    gemm.bf16_suggestions = measured(bf16);
    gemm.prior = F8_TRY(prior_choices(gemm.problem, device_, request_.prior, bf16.unmeasured));
    if (recipe.at(g).is_fp8() || is_grouped(gemm.problem.op)) {
      gemm.generated =
          F8_TRY(generated_candidates(gemm.problem, device_, options_.keep, gemm.prior));
      const Suggested fp8 = F8_TRY(suggested(gemm.problem, false));
      gemm.fp8_suggestions = measured(fp8);
    }
    return gemm;
  }

  void add_trial(const Problem& problem, const Candidate& candidate, std::string source_hash) {
    plan_.trials.push_back(
        {.problem = problem, .candidate = to_row(candidate, std::move(source_hash))});
  }

  Status add_trials(const PlannedGemm& gemm) {
    for (const Generated& candidate : gemm.generated) {
      const bool pruned = !candidate.pruned.empty();
      plan_.pruned += pruned ? 1 : 0;
      if (pruned && !request_.record_pruned) continue;
      add_trial(gemm.problem, {Impl::kGenerated, key(candidate.spec.config)},
                F8_TRY(hashes_.of(candidate.spec)));
    }
    for (const int i : gemm.fp8_suggestions) {
      add_trial(gemm.problem, {Impl::kCublasLt, f8::format("h{}", i)}, "");
    }
    for (const int i : gemm.bf16_suggestions) {
      add_trial(gemm.problem, {Impl::kBf16CublasLt, f8::format("h{}", i)}, "");
    }
    return {};
  }

  // The time that the GEMM's screening and final take; none where an earlier linear measures it.
  double gemm_s(const PlannedGemm& gemm, bool bf16) {
    if (!measured_.insert(gemm_identity(gemm.problem, bf16)).second) return 0;
    const auto kept = std::ranges::count_if(
        gemm.generated, [](const Generated& candidate) { return candidate.pruned.empty(); });
    const int candidates = static_cast<int>(bf16 ? std::ssize(gemm.bf16_suggestions)
                                                 : std::ssize(gemm.fp8_suggestions) + kept);
    const double one_s = profile_.gemm_ns(gemm.problem.flops(), !bf16) / 1e9;
    return screen_s(options_, candidates, one_s) +
           std::min(options_.finalists, candidates) *
               (std::max(options_.final_ms / 1e3, 10 * one_s) + kCandidateS);
  }

  // A linear and its baseline once.
  double pair_s(Shape shape) const {
    return (profile_.linear_ns(shape, true) + profile_.linear_ns(shape, false)) / 1e9;
  }
  // Of comparing what takes so long, once, with its baseline.
  double compared_s(double pair_s) const {
    return std::max(2 * options_.linear_min_ms / 1e3, 12 * pair_s) + 3 * pair_s + 0.05;
  }

  // `twice`: the baseline is looked for too.
  double linear_s(Shape shape, bool twice) const {
    double all_s = compared_s(pair_s(shape));
    if (options_.linears > 1) {  // the two rungs of whole linears
      all_s += (twice ? 2 : 1) * (options_.linears + 6) *
               (std::max(options_.linear_ms / 1e3, 2 * pair_s(shape)) + kCandidateS);
    }
    return all_s;
  }

  const SweepRequest& request_;
  const SweepOptions& options_;
  const runtime::DeviceInfo& device_;
  const DeviceProfile& profile_;
  const AskSuggestions& ask_;
  SweepPlan plan_;
  SourceHashes hashes_;
  std::set<std::string> planned_;   // linears and MLPs
  std::set<std::string> measured_;  // GEMM identities that an earlier linear measures
  std::map<std::string, Suggested> suggested_;
};

}  // namespace

Status apply_strategy(std::string_view name, SweepOptions& options) {
  constexpr int kAll = 1000;  // more than there are
  const SweepOptions defaults;
  const auto suggest = [&](auto SweepOptions::*figure, auto value) {
    if (options.*figure == defaults.*figure) options.*figure = value;
  };
  if (name == "auto") return {};
  if (name == "halving") {
    options.keep = kAll;
  } else if (name == "topk") {
    options.finalists = kAll;
  } else if (name == "race") {
    options.race = true;
    suggest(&SweepOptions::keep, 4);
    suggest(&SweepOptions::heuristics, 4);
    suggest(&SweepOptions::screen_ms, 3.0);
  } else if (name == "exhaustive") {
    options.keep = options.finalists = kAll;
  } else {
    return fail(ErrorCode::kInvalidArgument, "no strategy {}; there are {}", quote(name),
                fmt::join(kStrategies, ", "));
  }
  return {};
}

tuning_db::Method sweep_method(const SweepOptions& options) {
  nlohmann::json spec = {
      {"name", "final-v1"},
      {"verify", "sampled elements against fp64, before timing"},
      {"fill", "uniform [-1,1] through the recipe's cast"},
      {"rotate", rotation_text(options.conditions)},
      {"interleave", "random order and its reverse in every block; ABBA against the bf16 twin"},
      {"interval", "95 %, bootstrap over blocks"},
      {"clock", clock_text(options.conditions)},
      {"warm_s", options.warm_s},
      {"batch_us", options.batch_us},
      {"screen",
       {{"ms", options.screen_ms}, {"drop", options.screen_drop}, {"keep", options.keep}}},
      {"gemm",
       {{"ms", options.final_ms},
        {"max_ci", options.gemm_max_ci},
        {"finalists", options.finalists}}},
      {"linear",
       {{"batch_us", options.linear_batch_us},
        {"min_ms", options.linear_min_ms},
        {"max_ms", options.linear_max_ms},
        {"max_ci", options.max_ci},
        {"retry_noisy", options.retry_noisy},
        {"combinations", options.linears},
        {"combination_ms", options.linear_ms},
        {"within", options.linear_within}}}};
  if (options.race) spec["search"] = "race: the screening's times are final";
  return {.fidelity = std::string(fidelity_of(options.conditions)), .spec = spec.dump()};
}

AttentionMethod attention_method(const SweepRequest& request) {
  const SweepOptions& options = request.options;
  return {.batch_us = options.linear_batch_us,
          .stop = {.target = options.max_ci,
                   .min_s = options.linear_min_ms / 1e3,
                   .max_s = options.linear_max_ms / 1e3,
                   .min_blocks = kLinearBlocks},
          .retry_noisy = options.retry_noisy,
          .accuracy_tokens = request.attention ? request.attention->accuracy_tokens : 0,
          .conditions = options.conditions};
}

tuning_db::Method method_of(const SweepRequest& request) {
  return request.attention ? to_method(attention_method(request)) : sweep_method(request.options);
}

Result<std::vector<Problem>> problems_of(const SweepRequest& request) {
  if (request.attention) return problems_of(*request.attention);
  std::vector<Problem> problems;
  for (const SweptShape& shape : request.shapes) {
    for (const std::string& name : request.recipes) {
      const Recipe recipe = F8_TRY(find_recipe(name));
      problems.push_back(F8_TRY(Problem::make(Op::kLinear, recipe, shape, shape.groups)));
    }
  }
  for (const MlpShape& shape : request.mlps) {
    for (const std::string& name : request.recipes) {
      const Recipe recipe = F8_TRY(find_recipe(name));
      problems.push_back(F8_TRY(Problem::make(Op::kMlp, recipe, to_dims(shape))));
    }
  }
  return problems;
}

Result<SweepPlan> plan_sweep(const SweepRequest& request, const runtime::DeviceInfo& device,
                             const AskSuggestions& ask) {
  Planner planner(request, device, ask);
  if (request.attention) {
    for (const Problem& operation : F8_TRY(problems_of(*request.attention))) {
      planner.add_attention(operation);
    }
    return planner.plan();
  }
  // Small before large: the first results come soon, and memory grows in few steps.
  std::vector<SweptShape> shapes = request.shapes;
  std::ranges::stable_sort(shapes, {}, [](Shape s) { return s.m * s.n * s.k; });
  for (const SweptShape& shape : shapes) {
    for (const std::string& name : request.recipes) {
      const Recipe recipe = F8_TRY(find_recipe(name));
      F8_TRY(planner.add(recipe, shape));
    }
  }
  std::vector<MlpShape> mlps = request.mlps;
  std::ranges::stable_sort(mlps, {}, [](const MlpShape& s) { return s.m * s.n * s.k; });
  for (const MlpShape& shape : mlps) {
    for (const std::string& name : request.recipes) {
      const Recipe recipe = F8_TRY(find_recipe(name));
      F8_TRY(planner.add_mlp(recipe, shape));
    }
  }
  return planner.plan();
}

}  // namespace f8::tuner
