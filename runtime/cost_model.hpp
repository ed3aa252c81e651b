// The choice of a matmul's configuration where nothing was measured: a model of its time in SM
// clocks, evaluated for every candidate. Deterministic; no GPU needed.
//
//   time  = waves x (blocks of 128 of the contraction x block clocks + tile epilogue) + fill
//   block = max(tensor core, shared memory fill from L2, issue)
// A persistent grid works through its tiles in waves; the last one may be nearly empty, which is
// what makes small tiles win for small problems.
#pragma once

#include "codegen/kernel_spec.hpp"
#include "recipes/problem.hpp"
#include "recipes/tuning_table.hpp"
#include "runtime/gemm.hpp"

namespace f8::runtime {

// Predicted clocks of one product; `shape` is the GEMM's own.
[[nodiscard]] double predicted_clocks(const codegen::GemmSpec& spec, Shape shape, int sm_count);

// The candidate with the fewest predicted clocks; spec.config is ignored. Ties go to the larger
// tile, then to the smaller group, then to the smaller key.
[[nodiscard]] Result<codegen::GemmConfig> cheapest_config(const codegen::GemmSpec& spec,
                                                          Shape shape, int sm_count);

// GemmPlan::choose without a device: by `table` (null: none), else by the model.
[[nodiscard]] Result<GemmChoice> choose_gemm(const TuningTable* table, const GemmDesc& desc,
                                             int sm_count);

}  // namespace f8::runtime
