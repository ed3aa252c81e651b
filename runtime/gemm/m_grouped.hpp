// The M-grouped GEMM: the rows of a and of d are groups, each with a matrix of b, and the device alone
// knows where a group ends (runtime/experts/group_layout.hpp). For each group it is the dense GEMM of
// the same configuration, bit for bit:
//
//   gemm          a                 b                       d
//   output        x   [M][ldK]      w    [groups][N][ldK]   y  [M][N]
//   grad_input    dy  [M][ldN]      w^T  [groups][K][ldN]   dx [M][K]
// Operands in bf16 and f16 are the tensors themselves, of which grad_input has w [groups][N][K] too. Rows of a and d behind the last group are neither read nor written, but where d's become zero.
#pragma once

#include "codegen/kernels/experts/group_args.cuh"
#include "runtime/gemm/gemm.hpp"

namespace f8::runtime {

// A GEMM over groups, of rows or of K (k_grouped.hpp): shape.m of `gemm` are the most rows of all groups.
// A tensor that has a scale is a group's part of an operand in fp8, or its matrix.
struct GroupedDesc {
  GemmDesc gemm;
  kernels::GroupLayout layout;
  // All groups have one scale, where an operand has a tensor's: delayed scaling.
  bool one_scale_a = false;
  bool one_scale_b = false;
};
[[nodiscard]] codegen::GemmSpec m_grouped_spec(const GemmDesc& desc, const GemmConfig& config);

struct MGroupedCall {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  // Of an operand with one scale for each row [rows], [groups][n]; with one for each tensor those of
  // the groups lie kernels::kScaleStride apart. Of blocks a has 1x128, as casts of groups leave them,
  // `scale_rows` apart, and b 128x128 [groups].
  const float* inv_scale_a = nullptr;
  const float* inv_scale_b = nullptr;
  const void* layout = nullptr;
  int64_t m = 0;     // the rows of a
  int64_t ld_d = 0;  // elements, a multiple of 16 bytes; 0: dense
  int64_t scale_rows = 0;
  // Of operands in bf16 and f16, which have no scales: the strides of their rows, likewise.
  int64_t ld_a = 0;
  int64_t ld_b = 0;
  bool zero_tail = false;
};

class MGroupedGemm {
 public:
  [[nodiscard]] static Result<MGroupedGemm> create(const std::shared_ptr<Context>& context,
                                                   const GroupedDesc& desc,
                                                   const GemmConfig& config);
  // Enqueues one launch, or nothing where m is 0; no allocation, lock or synchronisation. The caller
  // has checked the pointers.
  [[nodiscard]] Status run(const MGroupedCall& call, Stream stream) const;
  [[nodiscard]] const GemmConfig& config() const { return config_; }

 private:
  MGroupedGemm(std::shared_ptr<Context> context, const GroupedDesc& desc, const GemmConfig& config,
               const Kernel& kernel)
      : context_(std::move(context)), desc_(desc), config_(config), kernel_(&kernel) {}

  std::shared_ptr<Context> context_;
  GroupedDesc desc_;
  GemmConfig config_;
  const Kernel* kernel_;
};

}  // namespace f8::runtime
