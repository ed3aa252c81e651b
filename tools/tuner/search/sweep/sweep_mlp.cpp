// The measurement of one MLP, with the kernels that its linears took.
#include "tools/tuner/search/sweep/sweep.hpp"

namespace f8::tuner {

Status Sweep::measure_mlp(const PlannedLinear& mlp, const Pending& pending, SweepOutcome& outcome) {
  progress_.doing = mlp.problem.key();
  (void)tick();
  std::optional<MlpKernels> kernels = mlp.mlp;
  std::vector<codegen::KernelSpec> specs = mlp.kernels;
  if (!kernels) {
    const std::array<const tuning_db::Database*, 1> own = {&db_};
    kernels = F8_TRY(mlp_kernels(mlp.problem, own, worker_.device()));
    if (kernels) specs = F8_TRY(gemm_kernels(mlp.problem, *kernels));
  }
  for (const codegen::KernelSpec& spec : specs) compiler_.want(spec);
  F8_TRY(wait_for(specs));
  if (!kernels) {
    const tuning_db::TrialResult unknown{
        .state = tuning_db::TrialState::kLaunchError,
        .reason = "its linears came to no time, whose kernels it would take"};
    for (const tuning_db::PendingTrial* trial : pending) F8_TRY(finish(*trial, unknown));
    outcome.linears.push_back({.problem = mlp.problem, .float8 = unknown, .bf16 = unknown});
    return {};
  }
  for (const tuning_db::PendingTrial* trial : pending) F8_TRY(db_.start_trial(*trial));
  const auto describe = [&](LinearResult& measured) {
    if (measured.float8.is_timed()) measured.float8.kernels = part_kernels(kernels->float8);
    if (measured.bf16.is_timed()) measured.bf16.kernels = part_kernels(kernels->bf16);
    return Status();
  };
  return compare_with_bf16(mlp, pending,
                           {.float8 = choices_text(kernels->float8),
                            .bf16 = choices_text(kernels->bf16),
                            .describe = describe},
                           outcome);
}

}  // namespace f8::tuner
