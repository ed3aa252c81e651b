#include "tools/tuner/search/plan/attention_plan.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tools/tuner/backend/toolchain.hpp"

namespace f8::tuner {

Result<std::vector<Problem>> problems_of(const AttentionRequest& request) {
  std::vector<Problem> problems;
  for (const AttentionShape& shape : request.shapes) {
    for (const AttentionRecipe recipe : request.recipes) {
      std::vector<Op> ops = {Op::kAttentionForward, Op::kAttention};
      if (recipe == AttentionRecipe::kFp8) ops.insert(ops.begin() + 1, Op::kAttentionBackward);
      for (const Op op : ops) problems.push_back(F8_TRY(attention_problem(op, recipe, shape)));
    }
  }
  std::ranges::stable_sort(problems, {}, attention_product_flops);
  return problems;
}

tuning_db::Method to_method(const AttentionMethod& method) {
  const nlohmann::json spec = {{"name", "attention-v2"},
                               {"verify", "sampled rows of o and dq against fp64, before timing"},
                               {"fill", "uniform [-1,1]"},
                               {"rotate", rotation_text(method.conditions)},
                               {"interleave", "ABBA against bf16, where it is timed too"},
                               {"interval", "95 %, bootstrap over blocks"},
                               {"clock", clock_text(method.conditions)},
                               {"batch_us", method.batch_us},
                               {"min_s", method.stop.min_s},
                               {"max_s", method.stop.max_s},
                               {"max_ci", method.stop.target},
                               {"retry_noisy", method.retry_noisy},
                               {"accuracy_tokens", method.accuracy_tokens}};
  return {.fidelity = std::string(fidelity_of(method.conditions)), .spec = spec.dump()};
}

std::vector<codegen::KernelSpec> attention_kernels(AttentionRecipe recipe,
                                                   const AttentionShape& shape) {
  using codegen::AttentionBackwardSpec, codegen::AttentionGradients, codegen::AttentionStep;
  const auto head_dim = static_cast<int>(shape.head_dim);
  const auto mask = shape.causal ? codegen::AttentionMask::kCausal : codegen::AttentionMask::kFull;
  std::vector<codegen::KernelSpec> kernels = {
      codegen::AttentionForwardSpec::of(head_dim, mask, false)};
  std::vector<AttentionStep> steps = {AttentionStep::kSumKeys, AttentionStep::kCast,
                                      AttentionStep::kDequantize};
  if (recipe == AttentionRecipe::kFp8) {
    steps.push_back(AttentionStep::kBackwardCast);
    std::vector<AttentionGradients> gradients = {AttentionGradients::kDq, AttentionGradients::kDkv};
    if (!AttentionBackwardSpec::has_both(head_dim)) {
      gradients = {AttentionGradients::kDq, AttentionGradients::kDk, AttentionGradients::kDv};
    }
    for (const AttentionGradients each : gradients) {
      kernels.emplace_back(AttentionBackwardSpec{head_dim, mask, false, each});
    }
  }
  for (const AttentionStep step : steps) {
    kernels.emplace_back(
        codegen::AttentionCastSpec{.head_dim = head_dim, .step = step, .packed = false});
  }
  return kernels;
}

tuning_db::TrialKey attention_trial(const Problem& operation) {
  return {
      operation,
      {.impl = tuning_db::Impl::kFloat8, .config = R"({"kernels":"tuned"})", .source_hash = ""}};
}

tuning_db::TrialKey bf16_attention_trial(const Problem& operation) {
  return {operation,
          {.impl = tuning_db::Impl::kBf16, .config = R"({"backend":"cudnn"})", .source_hash = ""}};
}

void name_library(tuning_db::TrialResult& bf16) {
  const auto version = cudnn_version();
  if (!bf16.is_timed() || !version) return;
  bf16.reason += f8::format("{}cuDNN {}", bf16.reason.empty() ? "" : "; ", *version);
}

double predicted_s(const Problem& operation, const AttentionMethod& method) {
  constexpr double kFlopsPerS = 500e12;  // of all operations and shapes, roughly
  constexpr double kCheckS = 0.5;        // operands, samples in fp64, and a rough time
  const int sides = operation.op == Op::kAttention ? 2 : 1;
  const double one_s = sides * operation.flops() / kFlopsPerS;
  const double blocks_s = 2 * method.stop.min_blocks * one_s;
  return kCheckS + std::max(method.stop.min_s, blocks_s) + 10 * one_s;
}

}  // namespace f8::tuner
