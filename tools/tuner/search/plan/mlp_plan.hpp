// MLPs in a sweep: each is measured as a whole, against its linears in bf16, with the kernels that the fastest rows of
// its linears name. So these are measured before it, in the same sweep or in an earlier one.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "tools/tuner/backend/candidate.hpp"

namespace f8::tuner {

struct MlpKernels {
  MlpChoices float8, bf16;
};

// The linears whose kernels an MLP takes: that of up, and that of down.
struct MlpLinears {
  Problem up, down;
};
[[nodiscard]] Result<MlpLinears> linears_of(const Problem& mlp);

// Those of the first database that has both linears of this class of device; nothing where none has.
[[nodiscard]] Result<std::optional<MlpKernels>> mlp_kernels(
    const Problem& mlp, std::span<const tuning_db::Database* const> databases,
    const DeviceClass& device);

// The GEMM kernels among them, which are compiled before the MLP is measured.
[[nodiscard]] Result<std::vector<codegen::KernelSpec>> gemm_kernels(const Problem& mlp,
                                                                    const MlpKernels& kernels);

}  // namespace f8::tuner
