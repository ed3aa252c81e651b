// The measurement of a part of attention, and the accuracy of its tensors.
#include "tools/tuner/backend/attention_accuracy.hpp"
#include "tools/tuner/search/sweep/sweep.hpp"

namespace f8::tuner {

using tuning_db::Accuracy;
using tuning_db::TrialResult;

// A head size and a mask have one accuracy under a recipe, whatever the number of tokens and heads.
Result<std::vector<Accuracy>> Sweep::accuracy_of(const Problem& part) {
  const int64_t tokens = request_.attention->accuracy_tokens;
  if (tokens == 0) return std::vector<Accuracy>{};
  const Problem compared = F8_TRY(
      attention_problem(Op::kAttention, attention_recipe(part), accuracy_shape(part, tokens)));
  auto known = accuracy_.find(compared.key());
  if (known == accuracy_.end()) {
    std::vector<Accuracy> all;
    for (const std::string_view kind : kAttentionData) {
      std::ranges::move(F8_TRY(worker_.accuracy(compared, kind, request_.seed)),
                        std::back_inserter(all));
    }
    known = accuracy_.emplace(compared.key(), std::move(all)).first;
  }
  return accuracy_of_part(part.op, known->second);
}

Status Sweep::measure_attention(const PlannedLinear& part, const tuning_db::PendingTrial& trial,
                                SweepOutcome& outcome) {
  progress_.doing = part.problem.key();
  (void)tick();
  F8_TRY(wait_for(part.kernels));
  F8_TRY(db_.start_trial(trial));
  const AttentionMethod method = attention_method(request_);
  InterleavedGroup group = group_of(part);
  group.candidates = {{.impl = Impl::kFloat8}};
  group.batch_us = method.batch_us;
  group.stop = method.stop;
  LinearResult measured{.problem = part.problem, .float8 = {}, .bf16 = {}};
  measured.float8 = F8_TRY(measure_again(std::move(group))).front();
  if (measured.float8.is_timed()) {
    auto accuracy = accuracy_of(part.problem);
    if (accuracy) {
      measured.float8.accuracy = *std::move(accuracy);
    } else if (accuracy.error().code == ErrorCode::kInterrupted ||
               accuracy.error().code == ErrorCode::kEnvironment) {
      return std::unexpected(accuracy.error());
    } else {
      measured.float8.reason +=
          f8::format("{}its accuracy is not known: {}", measured.float8.reason.empty() ? "" : "; ",
                     accuracy.error().message);
    }
  }
  F8_TRY(finish(trial, measured.float8));
  outcome.linears.push_back(std::move(measured));
  return {};
}

}  // namespace f8::tuner
