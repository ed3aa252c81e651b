// The gradients of an RMSNorm. With g = dy weight and n = x rstd,
//   dx = rstd (g - n mean(g n)), rounded once
//   dweight = the sum of dy n over rows, with n rounded as in the forward
// Blocks stay: each goes through the matrix by whole grids, and its threads keep the sums of their columns for
// dweight in registers. It leaves these sums, which bias_grad adds up.
#pragma once

#include "codegen/kernels/norm/norm_rows.cuh"

namespace f8::kernels {

// A thread reads these of its rows, kVectors at once.
template <class Place, Input kX, Input kOut, i32 kVectors>
struct NormRows {
  Vec8<kX> x[Place::kRows][kVectors];
  Vec8<kOut> dy[Place::kRows][kVectors];
  float rstd[Place::kRows];

  F8_DEVICE void load(const RmsNormBackwardArgs& args, i64 row0) {
#pragma unroll
    for (int r = 0; r < Place::kRows; ++r) {
      if constexpr (kVectors == Place::kVectors) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) load(args, row0, r, v, v);
      }
      rstd[r] = row0 + r < args.rows ? load_global(args.rstd + row0 + r) : 0.0F;
    }
  }
  F8_DEVICE void load(const RmsNormBackwardArgs& args, i64 row0, int r, int v, int slot) {
    const i32 column = Place::column(v);
    x[r][slot] = load_eight<kX>(args.x, args.ld_x, row0 + r, args.rows, column, args.cols);
    dy[r][slot] = load_eight<kOut>(args.dy, args.ld_dy, row0 + r, args.rows, column, args.cols);
  }
};

// Keeps the compiler from having elements as fp32 in registers from one pass over them to the next.
template <Input kInput>
F8_DEVICE void keep_packed(Vec8<kInput>& vector) {
#pragma unroll
  for (u32& word : vector.word) asm volatile("" : "+r"(word));
}

// Eight sums of a block, which one thread alone reads and writes.
F8_DEVICE void load_sums(const float* from, float (&sums)[8]) {
  const float4* const eight = reinterpret_cast<const float4*>(from);
  const float4 a = eight[0];
  const float4 b = eight[1];
  sums[0] = a.x, sums[1] = a.y, sums[2] = a.z, sums[3] = a.w;
  sums[4] = b.x, sums[5] = b.y, sums[6] = b.z, sums[7] = b.w;
}
F8_DEVICE void store_sums(float* to, const float (&sums)[8]) {
  float4* const eight = reinterpret_cast<float4*>(to);
  eight[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  eight[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
}

F8_DEVICE void clear_sums(float (&sums)[8]) {
#pragma unroll
  for (float& sum : sums) sum = 0;
}

// The sums of a block's groups become those of its columns.
template <class Place>
F8_DEVICE void store_partials(const float (&sums)[Place::kVectors][8], float* to, i32 cols) {
  if constexpr (Place::kGroups == 1) {
#pragma unroll
    for (int v = 0; v < Place::kVectors; ++v) {
      if (Place::column(v) < cols) store_sums(to + Place::column(v), sums[v]);
    }
  } else {
    constexpr i32 kCols = 8 * Place::kOfRow * Place::kVectors;
    __shared__ float groups[Place::kGroups][kCols];
#pragma unroll
    for (int v = 0; v < Place::kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < 8; ++e) groups[Place::group()][Place::column(v) + e] = sums[v][e];
    }
    __syncthreads();
    for (i32 column = static_cast<i32>(threadIdx.x); column < cols;
         column += Place::kThreads.of_block) {
      float sum = groups[0][column];
#pragma unroll
      for (int g = 1; g < Place::kGroups; ++g) sum = __fadd_rn(sum, groups[g][column]);
      to[column] = sum;
    }
  }
}

// Adds what eight elements of a row have to do with mean(g n), of which they are a part.
template <class Weights, Input kX, Input kOut>
F8_DEVICE float add_products(const Vec8<kX>& x, const Vec8<kOut>& dy, const Weights& weights,
                             float rstd, float sum) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float g = __fmul_rn(dy.value(e), weights.value(e));
    sum = __fmaf_rn(g, __fmul_rn(x.value(e), rstd), sum);
  }
  return sum;
}

// Returns dx of eight elements of a row, and adds to dweight.
template <bool kNormalized, class Weights, Input kX, Input kOut>
F8_DEVICE Vec8<kX> gradients(const Vec8<kX>& x, const Vec8<kOut>& dy, const Weights& weights,
                             float rstd, float mean, float (&dweight)[8]) {
  float normalized[8];
  normalize<kNormalized>(x, rstd, normalized);
  float dx[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    dweight[e] = __fmaf_rn(dy.value(e), normalized[e], dweight[e]);
    const float g = __fmul_rn(dy.value(e), weights.value(e));
    dx[e] = __fmul_rn(rstd, __fmaf_rn(-__fmul_rn(x.value(e), rstd), mean, g));
  }
  return rounded<kX>(dx);
}

template <Input kX, Input kWeight, Input kOut, i32 kKernelCols, bool kNormalized>
F8_DEVICE void rms_norm_backward(const RmsNormBackwardArgs& args) {
  using Place = NormPlace<kKernelCols, true>;
  // Warps of a long row wait for each other, so that the next rows are read meanwhile. The longest rows and their sums
  // do not stay in registers: rows are read twice, and sums are in memory.
  constexpr bool kIsWide = Place::kOfRow == 1024;
  constexpr bool kReadsAhead = Place::kWarps > 1 && !kIsWide;
  constexpr bool kKeepsWeights = Vec8<kWeight>::kWords * Place::kVectors <= 8 && !kIsWide;
  using Rows = NormRows<Place, kX, kOut, kIsWide ? 1 : Place::kVectors>;
  __shared__ float warps[2][Place::kRows][32];
  launch_dependents();
  grid_dependency_wait();
  NormColumnWeights<Place, kWeight, kNormalized, kKeepsWeights> weights{args.weight, args.cols,
                                                                        args.weight_offset};
  weights.read();
  float dweight[kIsWide ? 1 : Place::kVectors][8] = {};
  float* const partials = args.partials + i64{blockIdx.x} * args.cols;
  const i64 first = i64{blockIdx.x} * Place::kThreads.rows_of_block();
  const i64 stride = i64{gridDim.x} * Place::kThreads.rows_of_block();
  const i32 group_row = Place::group() * Place::kRows;
  Rows rows;
  Rows next;
  if constexpr (kReadsAhead) next.load(args, first + group_row);
  int parity = 0;
  for (i64 begin = first; begin < args.rows; begin += stride, parity ^= 1) {
    const i64 row0 = begin + group_row;
    if constexpr (kReadsAhead) {
      rows = next;
      next.load(args, row0 + stride);
    } else {
      rows.load(args, row0);
    }
    float mean[Place::kRows] = {};
#pragma unroll(kIsWide ? 1 : Place::kVectors)
    for (int v = 0; v < Place::kVectors; ++v) {
      const auto weight = weights.of(v);
#pragma unroll
      for (int r = 0; r < Place::kRows; ++r) {
        const int slot = kIsWide ? 0 : v;
        if constexpr (kIsWide) rows.load(args, row0, r, v, slot);
        mean[r] = add_products(rows.x[r][slot], rows.dy[r][slot], weight, rows.rstd[r], mean[r]);
      }
    }
    add_over_rows<Place>(mean, warps[parity]);
#pragma unroll
    for (float& sum : mean) sum = __fdiv_rn(sum, static_cast<float>(args.cols));
#pragma unroll(kIsWide ? 1 : Place::kVectors)
    for (int v = 0; v < Place::kVectors; ++v) {
      const i32 column = Place::column(v);
      const bool has_sums = kIsWide && args.partials != nullptr && column < args.cols;
      const auto weight = weights.of(v);
      float(&sums)[8] = dweight[kIsWide ? 0 : v];
      if (has_sums && begin != first) load_sums(partials + column, sums);
#pragma unroll
      for (int r = 0; r < Place::kRows; ++r) {
        const int slot = kIsWide ? 0 : v;
        if constexpr (kIsWide) rows.load(args, row0, r, v, slot);
        keep_packed(rows.x[r][slot]);
        keep_packed(rows.dy[r][slot]);
        const Vec8<kX> dx = gradients<kNormalized>(rows.x[r][slot], rows.dy[r][slot], weight,
                                                   rows.rstd[r], mean[r], sums);
        if (args.dx == nullptr || row0 + r >= args.rows || column >= args.cols) continue;
        dx.store(args.dx, (row0 + r) * args.ld_dx + column);
      }
      if (has_sums) store_sums(partials + column, sums);
      if constexpr (kIsWide) clear_sums(sums);
    }
  }
  if constexpr (!kIsWide) {
    if (args.partials != nullptr) store_partials<Place>(dweight, partials, args.cols);
  }
}

}  // namespace f8::kernels
