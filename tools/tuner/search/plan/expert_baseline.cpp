#include "tools/tuner/search/plan/expert_baseline.hpp"

#include <algorithm>

#include "runtime/gemm/choose.hpp"

namespace f8::tuner {

Result<ExpertBaseline> expert_baseline(const Problem& experts, const runtime::DeviceInfo& device,
                                       const TuningTable& table) {
  constexpr int kKernels = 3;  // of a GEMM
  const Recipe recipe = F8_TRY(find_recipe(experts.recipe));
  ExpertBaseline baseline;
  for (const Gemm g : kGemms) {
    const Problem gemm = F8_TRY(Problem::make(experts.sibling(to_op(g)), recipe, experts.dims));
    const runtime::GroupedDesc desc = F8_TRY(grouped_bf16_desc(gemm));
    const std::array planned = {F8_TRY(runtime::choose_grouped(&table, desc, device.sm_count))};
    const codegen::GemmSpec family = runtime::grouped_spec(desc.gemm);
    std::vector<Generated> all =
        in_order(family, runtime::grouped_shape(desc), codegen::gemm_candidates(family), device,
                 kKernels, planned);
    std::erase_if(all, [](const Generated& one) { return !one.pruned.empty(); });
    std::ranges::stable_partition(
        all, [&](const Generated& one) { return one.spec.config == planned.front().config; });
    KernelShortlist& shortlist = baseline.kernels[static_cast<size_t>(g)];
    for (const Generated& one : all) {
      baseline.specs.emplace_back(one.spec);
      runtime::GemmChoice choice;
      choice.config = one.spec.config;
      shortlist.timed.push_back({.choice = choice, .ns = one.predicted_ns});
    }
    shortlist.prior.resize(1);
    shortlist.prior.front().provider = Provider::kCublasLt;
  }
  return baseline;
}

Result<LinearChoices> search_expert_baseline(const ExpertBaseline& baseline, InterleavedGroup group,
                                             LinearSearchOptions options,
                                             const MeasureGroup& measure) {
  options.most = std::max(options.most, 2);
  return F8_TRY(search_linear(std::move(group), baseline.kernels, options, measure, Impl::kBf16))
      .choices;
}

}  // namespace f8::tuner
