// RMSNorm: y = (x rstd) weight, where rstd is 1 / sqrt(mean(x x) + eps) of a row. A row is read once: its threads
// keep it in registers, and those of short rows have several at once, so that loads overlap.
#pragma once

#include "codegen/kernels/norm/norm_rows.cuh"

namespace f8::kernels {

template <Input kX, Input kWeight, Input kOut, i32 kKernelCols, bool kNormalized>
F8_DEVICE void rms_norm(const RmsNormArgs& args) {
  using Place = NormPlace<kKernelCols, false>;
  // Weights are read beside x where registers hold both, else behind the sums.
  constexpr bool kEarly =
      (Vec8<kX>::kWords * Place::kRows + Vec8<kWeight>::kWords) * Place::kVectors <= 20;
  __shared__ float warps[Place::kRows][32];
  launch_dependents();
  grid_dependency_wait();
  const i64 row0 = (i64{blockIdx.x} * Place::kGroups + Place::group()) * Place::kRows;
  NormColumnWeights<Place, kWeight, kNormalized, kEarly> weights{args.weight, args.cols,
                                                                 args.weight_offset};
  Vec8<kX> x[Place::kRows][Place::kVectors];
  float sum[Place::kRows] = {};
#pragma unroll
  for (int r = 0; r < Place::kRows; ++r) {
#pragma unroll
    for (int v = 0; v < Place::kVectors; ++v) {
      x[r][v] = load_eight<kX>(args.x, args.ld_x, row0 + r, args.rows, Place::column(v), args.cols);
    }
  }
  weights.read();
#pragma unroll
  for (int r = 0; r < Place::kRows; ++r) {
#pragma unroll
    for (int v = 0; v < Place::kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[r] = __fmaf_rn(x[r][v].value(e), x[r][v].value(e), sum[r]);
    }
  }
  add_over_rows<Place>(sum, warps);
  float rstd[Place::kRows];
#pragma unroll
  for (int r = 0; r < Place::kRows; ++r) {
    const float mean = __fdiv_rn(sum[r], static_cast<float>(args.cols));
    rstd[r] = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, args.eps)));
    if (args.rstd != nullptr && Place::column(0) == 0 && row0 + r < args.rows) {
      args.rstd[row0 + r] = rstd[r];
    }
  }
#pragma unroll
  for (int v = 0; v < Place::kVectors; ++v) {
    if (Place::column(v) >= args.cols) continue;
    const auto weight = weights.of(v);
#pragma unroll
    for (int r = 0; r < Place::kRows; ++r) {
      if (row0 + r >= args.rows) continue;
      float y[8];
      normalize<kNormalized>(x[r][v], rstd[r], y);
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] = __fmul_rn(y[e], weight.value(e));
      rounded<kOut>(y).store(args.y, (row0 + r) * args.ld_y + Place::column(v));
    }
  }
}

}  // namespace f8::kernels
