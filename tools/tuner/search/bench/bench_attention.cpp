// The benchmark of attention: see bench.hpp.
#include "tools/tuner/backend/attention_accuracy.hpp"
#include "tools/tuner/search/bench/bench.hpp"

namespace f8::tuner {

Result<tuning_db::TrialResult> Bench::attention_part(const Problem& problem) {
  progress_(f8::format("timing {}", problem.key()));
  InterleavedGroup group = final_group(problem, 2 * options_.final_s);
  group.candidates = {{.impl = Impl::kFloat8}};
  std::vector<CandidateOutcome> outcomes = F8_TRY(measurer_.run(group));
  tuning_db::TrialResult result = std::move(outcomes.front().result);
  if (result.is_timed()) return result;
  return fail(ErrorCode::kInternal, "{}: {}: {}", problem.key(), tuning_db::to_string(result.state),
              result.reason);
}

AttentionMethod Bench::attention_method(int64_t accuracy_tokens) const {
  const InterleavedGroup group = final_group({}, 2 * options_.final_s);
  return {.batch_us = group.batch_us,
          .stop = group.stop,
          .accuracy_tokens = accuracy_tokens,
          .conditions = group.conditions};
}

Result<AttentionBench> Bench::attention(const Problem& problem) {
  AttentionBench bench{.problem = problem};
  if (attention_recipe(problem) == AttentionRecipe::kFp8) {
    Problem backward = problem;
    backward.op = Op::kAttentionBackward;
    bench.backward = F8_TRY(attention_part(backward));
  }
  bench.forward = F8_TRY(attention_part(problem));
  bench.saved_bytes = backend_.attention_saved_bytes();
  progress_(f8::format("timing the launches of {} one by one", problem.key()));
  bench.kernels = F8_TRY(shares(0));
  return bench;
}

Result<std::vector<tuning_db::Accuracy>> Bench::attention_accuracy(AttentionRecipe recipe,
                                                                   const AttentionShape& shape) {
  std::vector<tuning_db::Accuracy> accuracy;
  for (const std::string_view kind : kAttentionData) {
    progress_(f8::format("comparing {} data with fp64", kind));
    std::ranges::move(
        F8_TRY(tuner::attention_accuracy(backend_, recipe, shape, kind, options_.seed)),
        std::back_inserter(accuracy));
  }
  return accuracy;
}

}  // namespace f8::tuner
