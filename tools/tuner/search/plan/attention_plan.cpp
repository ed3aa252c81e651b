#include "tools/tuner/search/plan/attention_plan.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace f8::tuner {

Result<std::vector<Problem>> problems_of(const AttentionRequest& request) {
  std::vector<Problem> problems;
  for (const AttentionShape& shape : request.shapes) {
    for (const AttentionRecipe recipe : request.recipes) {
      problems.push_back(F8_TRY(attention_problem(Op::kAttentionForward, recipe, shape)));
      if (recipe != AttentionRecipe::kFp8) continue;
      problems.push_back(F8_TRY(attention_problem(Op::kAttentionBackward, recipe, shape)));
    }
  }
  std::ranges::stable_sort(problems, {}, attention_product_flops);
  return problems;
}

tuning_db::Method to_method(const AttentionMethod& method) {
  const nlohmann::json spec = {
      {"name", "attention-v1"},
      {"verify", "sampled rows of o, or of dq, against fp64, before timing"},
      {"fill", "uniform [-1,1]"},
      {"rotate", rotation_text(method.conditions)},
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

tuning_db::TrialKey attention_trial(const Problem& part) {
  return {
      part,
      {.impl = tuning_db::Impl::kFloat8, .config = R"({"kernels":"tuned"})", .source_hash = ""}};
}

double predicted_s(const Problem& part, const AttentionMethod& method) {
  constexpr double kFlopsPerS = 500e12;  // of all parts and shapes, roughly
  constexpr double kCheckS = 0.5;        // operands, samples in fp64, and a rough time
  const double one_s = part.flops() / kFlopsPerS;
  const double blocks_s = 2 * method.stop.min_blocks * one_s;
  return kCheckS + std::max(method.stop.min_s, blocks_s) + 10 * one_s;
}

}  // namespace f8::tuner
