// The sum of each token's rows by their scores, and the gradient of the scores. Both read y where a
// pair has a row of an expert's, and nothing where it is dropped (moe_args.cuh). Elements are vectors
// of 8, or single ones in matrices of fp32 whose rows are not whole vectors.
#pragma once

#include "codegen/kernels/cast/matrix_tile.cuh"
#include "codegen/kernels/experts/moe_args.cuh"

namespace f8::kernels {

// One fp32 element with the interface of Vec8.
struct Vec1 {
  u32 word[1];
  F8_DEVICE void load(const void* base, i64 element) {
    word[0] = load_global(static_cast<const u32*>(base) + element);
  }
  F8_DEVICE float value(int) const { return __uint_as_float(word[0]); }
};
template <Input kInput, int kWidth>
struct VecOf {
  using Type = Vec8<kInput>;
};
template <Input kInput>
struct VecOf<kInput, 1> {
  using Type = Vec1;
};

template <Input kOut, int kWidth>
F8_DEVICE void store_vector(void* out, i64 element, const float (&value)[kWidth]) {
  if constexpr (kWidth == 1) {
    static_cast<float*>(out)[element] = value[0];
  } else if constexpr (kOut == Input::kF32) {
    float4* const to = reinterpret_cast<float4*>(static_cast<float*>(out) + element);
    to[0] = make_float4(value[0], value[1], value[2], value[3]);
    to[1] = make_float4(value[4], value[5], value[6], value[7]);
  } else {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = kOut == Input::kBf16 ? pack_bf16(value[2 * i], value[2 * i + 1])
                                      : pack_f16(value[2 * i], value[2 * i + 1]);
    }
    store_global_words(static_cast<u16*>(out) + element, words);
  }
}

// The rows that are experts'; no position leads beyond y, whatever the memory has.
template <class Args>
F8_DEVICE u32 rows_of_experts(const Args& args) {
  return min(load_global(reinterpret_cast<const u32*>(args.rows)),
             static_cast<u32>(args.tokens) * static_cast<u32>(args.top_k));
}

// The products are rounded before they are added, in the order of the token's experts; a dropped
// pair adds 0. A thread reads kPairs of a token's pairs at once, of kVectors vectors each.
template <Input kY, Input kOut, int kWidth, int kPairs, int kVectors>
F8_DEVICE void combine_token(const CombineArgs& args) {
  constexpr i32 kStep = kTileThreads * kWidth;
  const u32 rows = rows_of_experts(args);
  const i64 pair0 = i64{blockIdx.x} * args.top_k;
  const u32* const position = reinterpret_cast<const u32*>(args.position) + pair0;
  for (i32 column0 = static_cast<i32>(threadIdx.x) * kWidth; column0 < args.cols;
       column0 += kVectors * kStep) {
    float sum[kVectors][kWidth];
    for (i32 k0 = 0; k0 < args.top_k; k0 += kPairs) {
      u32 row[kPairs];
      float score[kPairs];
      typename VecOf<kY, kWidth>::Type y[kVectors][kPairs];
#pragma unroll
      for (i32 i = 0; i < kPairs; ++i) {
        row[i] = k0 + i < args.top_k ? load_global(position + k0 + i) : ~0U;
        score[i] = args.scores != nullptr && k0 + i < args.top_k
                       ? load_global(args.scores + pair0 + k0 + i)
                       : 1.0F;
      }
#pragma unroll
      for (i32 v = 0; v < kVectors; ++v) {
        const i32 column = column0 + v * kStep;
#pragma unroll
        for (i32 i = 0; i < kPairs; ++i) {
          if (row[i] < rows && column < args.cols) {
            y[v][i].load(args.y, i64{row[i]} * args.cols + column);
          }
        }
      }
#pragma unroll
      for (i32 v = 0; v < kVectors; ++v) {
#pragma unroll
        for (i32 i = 0; i < kPairs; ++i) {
          if (k0 + i >= args.top_k) continue;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const float product = row[i] < rows ? __fmul_rn(y[v][i].value(j), score[i]) : 0.0F;
            sum[v][j] = k0 + i == 0 ? product : __fadd_rn(sum[v][j], product);
          }
        }
      }
    }
#pragma unroll
    for (i32 v = 0; v < kVectors; ++v) {
      const i32 column = column0 + v * kStep;
      if (column < args.cols) {
        store_vector<kOut>(args.out, i64{blockIdx.x} * args.cols + column, sum[v]);
      }
    }
  }
}

// One block has one token.
template <Input kY, Input kOut>
F8_DEVICE void combine(const CombineArgs& args) {
  launch_dependents();
  grid_dependency_wait();
  if constexpr (kY == Input::kF32 && kOut == Input::kF32) {
    if (args.cols % 8 != 0) return combine_token<kY, kOut, 1, 4, 1>(args);
  }
  constexpr int kHalf = kY == Input::kF32 ? 2 : 1;  // vectors are twice as long
  if (args.top_k == 1) {
    combine_token<kY, kOut, 8, 1, 4 / kHalf>(args);
  } else if (args.top_k <= 4) {
    combine_token<kY, kOut, 8, 4 / kHalf, 2 / kHalf>(args);
  } else {
    combine_token<kY, kOut, 8, 8 / kHalf, 1>(args);
  }
}

// Each lane adds up every 32nd vector, element by element, with one rounding for a product and its
// addition; then lane l adds what lane l + 16 has, and so on with 8, 4, 2 and 1.
template <Input kDout, Input kY, int kWidth>
F8_DEVICE float dot_of_warp(const ScoreGradientArgs& args, i64 token, i64 row) {
  constexpr i32 kInFlight = kWidth == 1 || kY == Input::kF32 ? 2 : 4;
  constexpr i32 kStep = 32 * kWidth;
  float sum = 0;
  for (i32 column0 = static_cast<i32>(threadIdx.x % 32) * kWidth; column0 < args.cols;
       column0 += kInFlight * kStep) {
    typename VecOf<kDout, kWidth>::Type dout[kInFlight];
    typename VecOf<kY, kWidth>::Type y[kInFlight];
#pragma unroll
    for (i32 i = 0; i < kInFlight; ++i) {
      const i32 column = column0 + i * kStep;
      if (column >= args.cols) continue;
      dout[i].load(args.dout, token * args.cols + column);
      y[i].load(args.y, row * args.cols + column);
    }
#pragma unroll
    for (i32 i = 0; i < kInFlight; ++i) {
      if (column0 + i * kStep >= args.cols) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum = __fmaf_rn(dout[i].value(j), y[i].value(j), sum);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFU, sum, step));
  }
  return sum;
}

// One warp has one pair.
template <Input kDout, Input kY>
F8_DEVICE void score_gradient(const ScoreGradientArgs& args) {
  launch_dependents();
  grid_dependency_wait();
  const i64 pair = i64{blockIdx.x} * (kTileThreads / 32) + threadIdx.x / 32;
  if (pair >= i64{args.tokens} * args.top_k) return;
  const u32 row = load_global(reinterpret_cast<const u32*>(args.position) + pair);
  float dot = 0;
  if (row < rows_of_experts(args)) {
    const i64 token = pair / args.top_k;
    if constexpr (kDout == Input::kF32 && kY == Input::kF32) {
      dot = args.cols % 8 != 0 ? dot_of_warp<kDout, kY, 1>(args, token, row)
                               : dot_of_warp<kDout, kY, 8>(args, token, row);
    } else {
      dot = dot_of_warp<kDout, kY, 8>(args, token, row);
    }
  }
  if (threadIdx.x % 32 == 0) args.dscores[pair] = dot;
}

}  // namespace f8::kernels
