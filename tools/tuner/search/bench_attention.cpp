// The benchmark of attention: see bench.hpp.
#include "tools/tuner/search/bench.hpp"

namespace f8::tuner {

Result<AttentionBench> Bench::attention(const Problem& problem) {
  AttentionBench bench{.problem = problem};
  progress_(f8::format("timing {}", problem.key()));
  InterleavedGroup group = final_group(problem, 2 * options_.final_s);
  group.candidates = {{.impl = Impl::kFloat8}};
  std::vector<CandidateOutcome> outcomes = F8_TRY(measurer_.run(group));
  bench.forward = std::move(outcomes.front().result);
  if (!bench.forward.is_timed()) {
    return fail(ErrorCode::kInternal, "{}: {}: {}", problem.key(),
                tuning_db::to_string(bench.forward.state), bench.forward.reason);
  }
  bench.saved_bytes = backend_.attention_saved_bytes();
  progress_(f8::format("timing the launches of {} one by one", problem.key()));
  bench.kernels = F8_TRY(shares(0));
  return bench;
}

Result<std::vector<tuning_db::Accuracy>> Bench::attention_accuracy(const AttentionShape& shape) {
  std::vector<tuning_db::Accuracy> accuracy;
  for (const std::string_view kind : kAttentionData) {
    progress_(f8::format("comparing {} data with fp64", kind));
    const AttentionData data = attention_data(kind, shape, options_.seed);
    const std::vector<float> o = F8_TRY(backend_.attention_output(shape, data));
    accuracy.push_back(accuracy_of(kind, "O", o, exact_attention(shape, data)));
  }
  return accuracy;
}

}  // namespace f8::tuner
