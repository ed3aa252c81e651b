#include "tools/tuner/search/plan/mlp_plan.hpp"

#include <algorithm>

#include "recipes/mlp.hpp"
#include "runtime/gemm/choose.hpp"

namespace f8::tuner {
namespace {

using tuning_db::TrialRow;

// The kernels of the fastest row of a linear; rows are in the order of Database::trials(), which has noisy ones
// behind the others.
std::optional<LinearChoices> fastest(const std::vector<TrialRow>& rows, tuning_db::Impl impl,
                                     const DeviceClass& device) {
  for (const TrialRow& row : rows) {
    if (row.candidate.impl != impl || !row.result.is_timed() || !row.device.is_same_class(device)) {
      continue;
    }
    LinearChoices choices;
    const bool whole = std::ranges::all_of(kGemms, [&](Gemm gemm) {
      const tuning_db::PartKernel* part = find_kernel(row.result.kernels, to_string(gemm));
      if (part == nullptr) return false;
      const auto kernel = parse_gemm_kernel(part->provider, part->config);
      if (kernel) choices[static_cast<size_t>(gemm)] = {*kernel};
      return kernel.has_value();
    });
    if (whole) return choices;
  }
  return std::nullopt;
}

Status add_gemm_kernels(const Problem& linear, const LinearChoices& choices, bool bf16,
                        std::vector<codegen::KernelSpec>& kernels) {
  for (const Gemm gemm : kGemms) {
    const runtime::GemmChoice& choice = choices[static_cast<size_t>(gemm)];
    if (choice.provider != Provider::kGenerated) continue;
    Problem own = linear;
    own.op = linear.sibling(to_op(gemm));
    const Recipe recipe = F8_TRY(find_recipe(linear.recipe));
    own = F8_TRY(Problem::make(own.op, recipe, own.dims));
    codegen::GemmSpec spec =
        bf16 ? runtime::grouped_spec(F8_TRY(grouped_bf16_desc(own)).gemm) : F8_TRY(gemm_spec(own));
    spec.config = choice.config;
    kernels.emplace_back(spec);
  }
  return {};
}

}  // namespace

Result<MlpLinears> linears_of(const Problem& problem) {
  const MlpShape mlp = mlp_shape(problem.dims);
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  const std::vector<Shape> shapes = f8::linears_of(mlp);
  return MlpLinears{F8_TRY(Problem::make(Op::kLinear, recipe, shapes.front(), mlp.groups)),
                    F8_TRY(Problem::make(Op::kLinear, recipe, shapes.back(), mlp.groups))};
}

Result<std::optional<MlpKernels>> mlp_kernels(const Problem& mlp,
                                              std::span<const tuning_db::Database* const> databases,
                                              const DeviceClass& device) {
  const MlpLinears linears = F8_TRY(linears_of(mlp));
  for (const tuning_db::Database* db : databases) {
    const std::vector<TrialRow> up = F8_TRY(db->trials(linears.up));
    const std::vector<TrialRow> down = F8_TRY(db->trials(linears.down));
    using tuning_db::Impl;
    const auto up_fp8 = fastest(up, Impl::kFloat8, device);
    const auto up_bf16 = fastest(up, Impl::kBf16, device);
    const auto down_fp8 = fastest(down, Impl::kFloat8, device);
    const auto down_bf16 = fastest(down, Impl::kBf16, device);
    if (!up_fp8 || !up_bf16 || !down_fp8 || !down_bf16) continue;
    return MlpKernels{{*up_fp8, *down_fp8}, {*up_bf16, *down_bf16}};
  }
  return std::optional<MlpKernels>{};
}

Result<std::vector<codegen::KernelSpec>> gemm_kernels(const Problem& mlp,
                                                      const MlpKernels& kernels) {
  const MlpLinears linears = F8_TRY(linears_of(mlp));
  std::vector<codegen::KernelSpec> all;
  F8_TRY(add_gemm_kernels(linears.up, kernels.float8.up, false, all));
  F8_TRY(add_gemm_kernels(linears.down, kernels.float8.down, false, all));
  if (mlp.groups().experts > 0) {  // else cuBLASLt's
    F8_TRY(add_gemm_kernels(linears.up, kernels.bf16.up, true, all));
    F8_TRY(add_gemm_kernels(linears.down, kernels.bf16.down, true, all));
  }
  return all;
}

}  // namespace f8::tuner
