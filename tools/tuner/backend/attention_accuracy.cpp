#include "tools/tuner/backend/attention_accuracy.hpp"

namespace f8::tuner {

using tuning_db::Accuracy;

AttentionShape accuracy_shape(const Problem& problem, int64_t tokens) {
  const AttentionShape own = attention_shape(problem);
  return {.tokens = tokens,
          .heads_q = kAccuracyHeads,
          .heads_kv = kAccuracyHeads,
          .head_dim = own.head_dim,
          .causal = own.causal};
}

Result<std::vector<Accuracy>> attention_accuracy(Backend& backend, AttentionRecipe recipe,
                                                 const AttentionShape& shape, std::string_view kind,
                                                 uint64_t seed) {
  const AttentionData data = attention_data(kind, shape, seed);
  const auto own = F8_TRY(backend.attention_results(recipe, shape, data));
  const bool backward = !own.dq.empty();
  const auto exact = exact_attention(shape, data, backward);
  std::vector<Accuracy> accuracy = {accuracy_of(kind, "O", own.o, exact.o)};
  if (!backward) return accuracy;
  accuracy.push_back(accuracy_of(kind, "dQ", own.dq, exact.dq));
  accuracy.push_back(accuracy_of(kind, "dK", own.dk, exact.dk));
  accuracy.push_back(accuracy_of(kind, "dV", own.dv, exact.dv));
  return accuracy;
}

std::vector<Accuracy> accuracy_of_part(Op part, const std::vector<Accuracy>& accuracy) {
  std::vector<Accuracy> own;
  std::ranges::copy_if(accuracy, std::back_inserter(own), [&](const Accuracy& a) {
    return part == Op::kAttention || (a.tensor == "O") == (part == Op::kAttentionForward);
  });
  return own;
}

}  // namespace f8::tuner
