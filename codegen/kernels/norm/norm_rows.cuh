// The kernels of an RMSNorm share this: the place of a thread, the sums of rows, and a normalised element.
#pragma once

#include "codegen/kernels/cast/rounded.cuh"
#include "codegen/kernels/norm/norm_args.cuh"

namespace f8::kernels {

template <i32 kKernelCols, bool kBackward>
struct NormPlace {
  static constexpr NormThreads kThreads = norm_threads(kKernelCols, kBackward);
  static constexpr i32 kOfRow = kThreads.of_row;
  static constexpr i32 kVectors = kThreads.vectors;
  static constexpr i32 kRows = kThreads.rows;
  static constexpr i32 kGroups = kThreads.groups();
  static constexpr i32 kWarps = kOfRow / 32;  // of a row, or 0

  static F8_DEVICE i32 group() { return static_cast<i32>(threadIdx.x) / kOfRow; }
  static F8_DEVICE i32 column(i32 vector) {
    return 8 * (vector * kOfRow + static_cast<i32>(threadIdx.x) % kOfRow);
  }
};

// Eight elements of a row, or zeros where it has none.
template <Input kInput>
F8_DEVICE Vec8<kInput> load_eight(const void* x, i64 ld, i64 row, i32 rows, i32 column, i32 cols) {
  Vec8<kInput> vector;
  if (row < rows && column < cols) {
    vector.load(x, row * ld + column);
  } else {
    vector.clear();
  }
  return vector;
}

// Each thread of a row has its sum then. Rows of several warps exchange them in `warps`, which no thread still reads.
template <class Place>
F8_DEVICE void add_over_rows(float (&sum)[Place::kRows], float (&warps)[Place::kRows][32]) {
#pragma unroll
  for (int step = (Place::kOfRow < 32 ? Place::kOfRow : 32) / 2; step > 0; step /= 2) {
#pragma unroll
    for (int r = 0; r < Place::kRows; ++r) {
      sum[r] = __fadd_rn(sum[r], __shfl_xor_sync(0xFFFFFFFFU, sum[r], step));
    }
  }
  if constexpr (Place::kWarps > 1) {
    const u32 first = threadIdx.x / Place::kOfRow * Place::kWarps;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int r = 0; r < Place::kRows; ++r) warps[r][threadIdx.x / 32] = sum[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < Place::kRows; ++r) {
      sum[r] = warps[r][first];
#pragma unroll
      for (int w = 1; w < Place::kWarps; ++w) sum[r] = __fadd_rn(sum[r], warps[r][first + w]);
    }
  }
}

// The weights of eight columns, as elements are multiplied by them.
template <Input kWeight, bool kNormalized>
struct NormWeights {
  Vec8<kWeight> weight;
  float offset;

  F8_DEVICE float value(int e) const {
    return kNormalized ? weight.value(e) : __fadd_rn(offset, weight.value(e));
  }
};

// The weights of a thread's columns, which are kept in registers or read as they are used.
template <class Place, Input kWeight, bool kNormalized, bool kKeeps>
struct NormColumnWeights {
  const void* weight;
  i32 cols;
  float offset;
  Vec8<kWeight> kept[kKeeps ? Place::kVectors : 1];

  F8_DEVICE void read() {
    if constexpr (kKeeps) {
#pragma unroll
      for (int v = 0; v < Place::kVectors; ++v) kept[v] = load(v);
    }
  }
  F8_DEVICE NormWeights<kWeight, kNormalized> of(int v) const {
    if constexpr (kKeeps) {
      return {kept[v], offset};
    } else {
      return {load(v), offset};
    }
  }

 private:
  F8_DEVICE Vec8<kWeight> load(int v) const {
    return load_eight<kWeight>(weight, 0, 0, 1, Place::column(v), cols);
  }
};

// x rstd of eight elements, as the forward multiplies it: kNormalized says that it is rounded to x's type.
template <bool kNormalized, Input kX>
F8_DEVICE void normalize(const Vec8<kX>& x, float rstd, float (&normalized)[8]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) normalized[e] = __fmul_rn(x.value(e), rstd);
  if constexpr (kNormalized && kX != Input::kF32) {
    const Vec8<kX> vector = rounded<kX>(normalized);
#pragma unroll
    for (int e = 0; e < 8; ++e) normalized[e] = vector.value(e);
  }
}

}  // namespace f8::kernels
