#include "tools/tuner/search/sweep_plan.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/hash.hpp"
#include "codegen/emit.hpp"

namespace f8::tuner {
namespace {

// Besides the timing itself: planning, loading, checking and capturing one subject.
constexpr double kSubjectS = 0.008;

// Of a kernel's source, once for each kernel.
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

double rough_gemm_s(const Problem& problem, bool bf16) {
  return problem.flops() / (bf16 ? 0.65e15 : 1.1e15) + 4e-6;
}

double screen_s(const SweepKnobs& knobs, int subjects, double one_s) {
  // Two batches at least, whatever the share.
  return subjects * (std::max(knobs.screen_ms / 1e3, 2 * one_s) + 2 * one_s + kSubjectS);
}

}  // namespace

tuning_db::Method sweep_method(const SweepKnobs& knobs) {
  const nlohmann::json spec = {
      {"name", "final-v1"},
      {"verify", "sampled elements against fp64, before timing"},
      {"fill", "uniform [-1,1] through the recipe's cast"},
      {"rotate", ">= 2 x L2 and >= 2 operand sets"},
      {"interleave", "random order and its reverse in every block; ABBA against the bf16 twin"},
      {"interval", "95 %, bootstrap over blocks"},
      {"clock", "steady: a power cap is kept, thermal and hardware slowdowns are dropped"},
      {"warm_s", knobs.warm_s},
      {"batch_us", knobs.batch_us},
      {"screen", {{"ms", knobs.screen_ms}, {"drop", knobs.screen_drop}, {"keep", knobs.keep}}},
      {"gemm",
       {{"ms", knobs.final_ms}, {"max_ci", knobs.gemm_max_ci}, {"finalists", knobs.finalists}}},
      {"linear",
       {{"batch_us", knobs.linear_batch_us},
        {"min_ms", knobs.linear_min_ms},
        {"max_ms", knobs.linear_max_ms},
        {"max_ci", knobs.max_ci},
        {"retry_noisy", knobs.retry_noisy},
        {"combinations", knobs.linears},
        {"combination_ms", knobs.linear_ms},
        {"within", knobs.linear_within}}}};
  return {.fidelity = "final", .spec = spec.dump()};
}

Result<SweepPlan> plan_sweep(const SweepRequest& request, const runtime::DeviceInfo& device,
                             const CountHeuristics& count) {
  const SweepKnobs& knobs = request.knobs;
  SweepPlan plan;
  SourceHashes hashes;
  std::set<std::string> measured;  // identities that an earlier linear has measured
  std::map<std::string, int> counted;
  const auto heuristics = [&](const Problem& problem, bool bf16) -> Result<int> {
    const std::string identity = gemm_identity(problem, bf16);
    if (const auto found = counted.find(identity); found != counted.end()) return found->second;
    const int found = F8_TRY(count(problem, bf16));
    return counted[identity] = std::min(found, knobs.heuristics);
  };
  // Small before large: the first results come soon, and memory grows in few steps.
  std::vector<Shape> shapes = request.shapes;
  std::ranges::stable_sort(shapes, {}, [](Shape s) { return s.m * s.n * s.k; });
  for (const Shape shape : shapes) {
    for (const std::string& name : request.recipes) {
      const Recipe recipe = F8_TRY(find_recipe(name));
      PlannedLinear linear;
      linear.problem = F8_TRY(Problem::make(Op::kLinear, recipe, shape));
      for (const Gemm g : kGemms) {
        PlannedGemm& gemm = linear.gemms[static_cast<size_t>(g)];
        gemm.problem = F8_TRY(Problem::make(to_op(g), recipe, shape));
        if (recipe.at(g).is_fp8()) {
          gemm.prior = F8_TRY(prior_choices(gemm.problem, device, request.prior));
          gemm.generated =
              F8_TRY(generated_candidates(gemm.problem, device, knobs.keep, gemm.prior));
          gemm.fp8_heuristics = F8_TRY(heuristics(gemm.problem, false));
        }
        gemm.bf16_heuristics = F8_TRY(heuristics(gemm.problem, true));

        int subjects = gemm.fp8_heuristics;
        for (const Generated& candidate : gemm.generated) {
          const bool pruned = !candidate.pruned.empty();
          plan.pruned += pruned ? 1 : 0;
          subjects += pruned ? 0 : 1;
          if (pruned && !request.record_pruned) continue;
          plan.cells.push_back(
              {.problem = gemm.problem,
               .candidate = to_candidate(
                   {.impl = "generated", .config = codegen::key(candidate.spec.config)},
                   F8_TRY(hashes.of(candidate.spec)))});
        }
        for (const bool bf16 : {false, true}) {
          const int offered = bf16 ? gemm.bf16_heuristics : gemm.fp8_heuristics;
          for (int i = 0; i < offered; ++i) {
            plan.cells.push_back(
                {.problem = gemm.problem,
                 .candidate = to_candidate(
                     {.impl = bf16 ? "bf16_cublaslt" : "cublaslt", .config = fmt::format("h{}", i)},
                     "")});
          }
          if (!measured.insert(gemm_identity(gemm.problem, bf16)).second) continue;
          const double one_s = rough_gemm_s(gemm.problem, bf16);
          const int finalists = std::min(knobs.finalists, bf16 ? offered : subjects);
          linear.predicted_s +=
              screen_s(knobs, bf16 ? offered : subjects, one_s) +
              finalists * (std::max(knobs.final_ms / 1e3, 10 * one_s) + kSubjectS);
        }
      }
      for (const char* impl : {"float8", "bf16"}) {
        plan.cells.push_back({.problem = linear.problem,
                              .candidate = to_candidate({.impl = impl, .config = ""}, "")});
      }
      const double pair_s = (rough_linear_ns(shape, true) + rough_linear_ns(shape, false)) / 1e9;
      linear.predicted_s +=
          std::max(2 * knobs.linear_min_ms / 1e3, 12 * pair_s) + 3 * pair_s + 0.05;
      if (knobs.linears > 1) {  // the two rungs of whole linears
        linear.predicted_s +=
            (knobs.linears + 6) * (std::max(knobs.linear_ms / 1e3, 2 * pair_s) + kSubjectS);
      }
      plan.predicted_s += linear.predicted_s;
      plan.linears.push_back(std::move(linear));
    }
  }
  return plan;
}

}  // namespace f8::tuner
