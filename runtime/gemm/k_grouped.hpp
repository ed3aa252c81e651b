// The K-grouped GEMM: K is groups, each with a matrix of d, and the device alone knows where a group
// ends (runtime/experts/group_layout.hpp). For each group it is the dense GEMM of the same
// configuration, bit for bit:
//
//   gemm          a                 b                 d
//   grad_weight   dy^T [N][P]       x^T [K][P]        dw [groups][N][K]
// P is columns_of_groups(): tensor cores read fp8 along K alone, so each group's columns begin at a
// whole block of 128, and the last one's are zeros behind them. Operands in bf16 and f16 are the tensors
// themselves, dy [M][N] and x [M][K], whose groups begin at any row. A group without columns has a d of
// zeros, or an unchanged one where the result is added to it.
#pragma once

#include <algorithm>

#include "runtime/gemm/m_grouped.hpp"

namespace f8::runtime {

// The columns of a transposed copy of m rows of so many groups: the most blocks of 128 that these have.
[[nodiscard]] constexpr int64_t columns_of_groups(int64_t m, int64_t groups) {
  constexpr int64_t kBlock = kernels::kCastTile;
  return (m + (kBlock - 1) * std::min(m, groups)) / kBlock * kBlock;
}

[[nodiscard]] codegen::GemmSpec k_grouped_spec(const GemmDesc& desc, const GemmConfig& config);

struct KGroupedCall {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  // Of an operand with one scale for each row [groups][rows]; with one for each tensor those of the
  // groups lie kernels::kScaleStride apart; with blocks as those of a matrix [rows][P].
  const float* inv_scale_a = nullptr;
  const float* inv_scale_b = nullptr;
  // Where a is some rows of a whole: the whole's, whose inverse scales are between those of two groups or
  // blocks; 0: a has them all.
  int64_t scale_rows_a = 0;
  const void* layout = nullptr;
  int64_t ld_d = 0;  // elements, a multiple of 16 bytes; 0: dense
  // Of operands in bf16 and f16, which have no scales: their rows, and likewise the strides of these.
  int64_t m = 0;
  int64_t ld_a = 0;
  int64_t ld_b = 0;
};

class KGroupedGemm {
 public:
  [[nodiscard]] static Result<KGroupedGemm> create(const std::shared_ptr<Context>& context,
                                                   const GroupedDesc& desc,
                                                   const GemmConfig& config);
  // Enqueues one launch; no allocation, lock or synchronisation. The caller has checked the pointers.
  [[nodiscard]] Status run(const KGroupedCall& call, Stream stream) const;
  [[nodiscard]] const GemmConfig& config() const { return config_; }

 private:
  KGroupedGemm(std::shared_ptr<Context> context, const GroupedDesc& desc, const GemmConfig& config,
               const Kernel& kernel)
      : context_(std::move(context)), desc_(desc), config_(config), kernel_(&kernel) {}

  std::shared_ptr<Context> context_;
  GroupedDesc desc_;
  GemmConfig config_;
  const Kernel* kernel_;
};

}  // namespace f8::runtime
