// The measurement of an operation of attention, and the accuracy of its tensors.
#include "tools/tuner/backend/attention_accuracy.hpp"
#include "tools/tuner/search/plan/attention_plan.hpp"
#include "tools/tuner/search/sweep/sweep.hpp"

namespace f8::tuner {

using tuning_db::Accuracy;
using tuning_db::TrialResult;

// A head size and a mask have one accuracy under a recipe, whatever the number of tokens and heads.
Result<std::vector<Accuracy>> Sweep::accuracy_of(const Problem& operation) {
  const int64_t tokens = request_.attention->accuracy_tokens;
  if (tokens == 0) return std::vector<Accuracy>{};
  const Problem compared = F8_TRY(attention_problem(Op::kAttention, attention_recipe(operation),
                                                    accuracy_shape(operation, tokens)));
  auto known = accuracy_.find(compared.key());
  if (known == accuracy_.end()) {
    std::vector<Accuracy> all;
    for (const std::string_view kind : kAttentionData) {
      std::ranges::move(F8_TRY(worker_.accuracy(compared, kind, request_.seed)),
                        std::back_inserter(all));
    }
    known = accuracy_.emplace(compared.key(), std::move(all)).first;
  }
  return accuracy_of_part(operation.op, known->second);
}

// An accuracy that cannot be told leaves the time.
Status Sweep::add_accuracy(const Problem& operation, TrialResult& result) {
  if (!result.is_timed()) return {};
  auto accuracy = accuracy_of(operation);
  if (accuracy) {
    result.accuracy = *std::move(accuracy);
    return {};
  }
  const Error& error = accuracy.error();
  if (error.code == ErrorCode::kInterrupted || error.code == ErrorCode::kEnvironment) {
    return std::unexpected(error);
  }
  result.reason += f8::format("{}its accuracy is not known: {}", result.reason.empty() ? "" : "; ",
                              error.message);
  return {};
}

// Forward and backward together stand beside bf16, and each by itself alone.
Status Sweep::measure_attention(const PlannedLinear& operation, const Pending& pending,
                                SweepOutcome& outcome) {
  progress_.doing = operation.problem.key();
  (void)tick();
  F8_TRY(wait_for(operation.kernels));
  for (const tuning_db::PendingTrial* trial : pending) F8_TRY(db_.start_trial(*trial));
  Compared compared{.float8 = "", .bf16 = {}, .describe = {}};
  if (operation.problem.op == Op::kAttention) compared.bf16 = "";
  compared.describe = [&](LinearResult& measured) -> Status {
    name_library(measured.bf16);
    return add_accuracy(operation.problem, measured.float8);
  };
  return compare_with_bf16(operation, pending, compared, outcome);
}

}  // namespace f8::tuner
