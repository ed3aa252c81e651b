#include "tools/float8-tune/filter/kernels_of.hpp"

#include "base/text.hpp"
#include "runtime/gemm/choose.hpp"
#include "tools/tuner/backend/candidate.hpp"
#include "tools/tuner/search/kernel_set.hpp"

namespace f8::cli {

Status add_grouped_kernels(const Recipe& recipe, Shape shape, const Groups& groups,
                           const TuningTable& table, const std::string& part,
                           std::vector<Kernel>& kernels) {
  for (const Gemm gemm : kGemms) {
    const auto problem = F8_TRY(Problem::make(to_op(gemm), recipe, shape, groups));
    const auto desc = F8_TRY(tuner::grouped_desc(problem));
    const auto chosen = F8_TRY(runtime::choose_grouped(&table, desc, tuner::kH100SmCount));
    std::string_view by = chosen.why;
    (void)take(by, "by ");  // which is said before it
    kernels.push_back({f8::format("{}{}", part, to_string(gemm)),
                       f8::format("generated {}", key(chosen.config)), std::string(by)});
  }
  return {};
}

Result<std::vector<Kernel>> kernels_of(const Recipe& recipe, const NamedLinear& layer,
                                       int64_t tokens, const TuningTable& table) {
  std::vector<Kernel> kernels;
  if (layer.is_experts()) {
    for (const auto& [part, shape] : expert_linears(layer, tokens)) {
      if (!validate_shape(shape)) continue;
      F8_TRY(add_grouped_kernels(recipe, shape, layer.groups, table, f8::format("{} ", part),
                                 kernels));
    }
    return kernels;
  }
  const Shape shape = {tokens, layer.out_features, layer.in_features};
  if (!validate_shape(shape)) return kernels;
  for (const Gemm gemm : kGemms) {
    const auto chosen = tuner::choose_gemm(recipe, gemm, shape, &table);
    if (!chosen) {
      kernels.push_back({std::string(to_string(gemm)), chosen.error().message, "nobody"});
      continue;
    }
    kernels.push_back(
        {std::string(to_string(gemm)),
         f8::format("{} {}", to_string(chosen->choice.provider), config_text(chosen->choice)),
         std::string(to_string(chosen->by))});
  }
  return kernels;
}

}  // namespace f8::cli
