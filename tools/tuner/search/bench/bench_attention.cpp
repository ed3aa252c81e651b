// The benchmark of attention: see bench.hpp.
#include "tools/tuner/backend/attention_accuracy.hpp"
#include "tools/tuner/search/bench/bench.hpp"

namespace f8::tuner {

// Leaves in `no_bf16` why bf16 is not beside it.
Result<AttentionTimes> Bench::attention_times(const Problem& operation, std::string& no_bf16) {
  progress_(f8::format("timing {}", operation.key()));
  InterleavedGroup group = final_group(operation, 2 * options_.final_s);
  group.candidates = {{.impl = Impl::kFloat8}, {.impl = Impl::kBf16}};
  group.purpose = Ratios{.reference = 1};
  std::vector<CandidateOutcome> outcomes = F8_TRY(measurer_.run(group));
  AttentionTimes times{.float8 = std::move(outcomes[0].result)};
  tuning_db::TrialResult& bf16 = outcomes[1].result;
  if (bf16.is_timed()) {
    name_library(bf16);
    times.bf16 = std::move(bf16);
  } else {
    no_bf16 = bf16.reason;
  }
  return times;
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
  // Times one, and its launches where it is the first that there is.
  const auto time = [&](Op op) -> Result<AttentionTimes> {
    Problem operation = problem;
    operation.op = op;
    AttentionTimes times = F8_TRY(attention_times(operation, bench.no_bf16));
    if (!times.float8.is_timed()) {
      return fail(ErrorCode::kInternal, "{}: {}: {}", operation.key(),
                  tuning_db::to_string(times.float8.state), times.float8.reason);
    }
    if (!bench.kernels.empty()) return times;
    progress_(f8::format("timing the launches of {} one by one", operation.key()));
    bench.kernels = F8_TRY(shares(0));
    return times;
  };
  // It has the launches of the others. Without bf16 there is none.
  auto both = time(Op::kAttention);
  if (both) {
    bench.both = *std::move(both);
  } else if (both.error().code == ErrorCode::kCuda || bench.no_bf16.empty()) {
    return std::unexpected(both.error());
  }
  if (attention_recipe(problem) == AttentionRecipe::kFp8) {
    bench.backward = F8_TRY(time(Op::kAttentionBackward));
  }
  bench.forward = F8_TRY(time(Op::kAttentionForward));
  bench.saved_bytes = backend_.attention_saved_bytes();
  return bench;
}

std::vector<MeasuredTrial> trials_of(const AttentionBench& bench,
                                     const std::vector<tuning_db::Accuracy>& accuracy) {
  std::vector<MeasuredTrial> trials;
  const auto add = [&](Op op, const std::optional<AttentionTimes>& times) {
    if (!times) return;
    Problem operation = bench.problem;
    operation.op = op;
    if (times->bf16) trials.push_back({bf16_attention_trial(operation), *times->bf16});
    trials.push_back({attention_trial(operation), times->float8});
    trials.back().result.accuracy = accuracy_of_part(op, accuracy);
  };
  add(Op::kAttentionForward, bench.forward);
  add(Op::kAttentionBackward, bench.backward);
  add(Op::kAttention, bench.both);
  return trials;
}

Status keep(tuning_db::Database& db, std::string_view run_uuid,
            std::span<const MeasuredTrial> trials) {
  const auto pending = F8_TRY(db.resume_run(run_uuid));
  for (size_t i = 0; i < pending.size(); ++i) {
    tuning_db::TrialResult result = trials[i].result;
    if (result.ratio) result.ratio->pair_uuid = pending[i - 1].uuid;
    F8_TRY(db.start_trial(pending[i]));
    F8_TRY(db.finish_trial(pending[i], result));
  }
  return db.end_run(run_uuid, "done");
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
