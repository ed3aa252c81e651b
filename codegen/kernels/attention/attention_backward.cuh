// The backward of attention in fp8, for heads of 64, 128 and 256, over what the forward multiplied
// (attention_forward.cuh): this is what its kernels share (attention_backward_dq.cuh, attention_backward_dkv.cuh).
//
// The gradients are dQ = dS K, dK = dS^T Q and dV = P^T dO, with P = 2^(S - LSE) and dS = P (dO V^T - delta). All
// products are fp8 MMAs. P and dS are rounded to e4m3 in registers, and are the next MMA's operand as they lie there, so
// that K^T, Q^T and dO^T have their tokens in the order of fragments.
//
// Scales of P and dS are powers of two. A row of dS has a bound (dQ): the largest P of the row, which forward leaves,
// times the norms of dO and V. Of 16 keys, those of a warp, P has a scale that follows its values (dK, dV): where an
// element could saturate it gets smaller, and the sums so far are multiplied by the ratio; dS has a bound by norms
// besides. A scale of what is summed over, such as that of K's blocks in dQ, goes into dS before it is rounded.
//
// The sums of MMAs lose bits when they are long, so they are added to fp32 sums in global memory now and then, which
// are those of a CTA and stay in L2. Sums do not depend on what other CTAs do: the same bits from run to run.
#pragma once

#include "codegen/kernels/attention/attention_backward_args.cuh"
#include "codegen/kernels/attention/attention_forward.cuh"
#include "codegen/kernels/attention/e4m3.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

// Returns true where an element of x may be more than e4m3 has, or is no number. The sum of their squares tells, which
// costs less than their maximum.
F8_DEVICE bool may_saturate(const float (&x)[32]) {
  float chains[4] = {};
#pragma unroll
  for (int i = 0; i < 32; ++i) chains[i % 4] = fmaf(x[i], x[i], chains[i % 4]);
  return !((chains[0] + chains[1]) + (chains[2] + chains[3]) <= 448.0F * 448.0F);
}

// The power of two that brings `most`, which is not negative, between 2^6 and 2^7, so that somewhat larger values need
// no other one: at most 2^100, and NaN where `most` is not finite.
F8_DEVICE float scale_for_e4m3(float most) {
  const u32 exponent = max(__float_as_uint(most) >> 23, 34U);
  return __uint_as_float(exponent == 255 ? 0x7FFFFFFFU : (260 - exponent) << 23);
}

// 1 / x of a power of two. A division that rounds has a call for rare values, which costs registers.
F8_DEVICE float inverse_power(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

F8_DEVICE float bound_of(float x) {
  return __uint_as_float(attention_bound_bits(__float_as_uint(x)));
}

// The A operand of MMAs of 64 rows, from an accumulator of 64 columns.
F8_DEVICE void round_to_operand(const float (&x)[32], u32 (&words)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float* of_word = x + i / 4 * 16 + i % 4 / 2 * 8 + i % 2 * 2;
    words[i] = pack_e4m3(of_word[0], of_word[1], of_word[4], of_word[5]);
  }
}

// Sums of a warpgroup in global memory: 16 bytes of each of its threads lie side by side.
struct AttentionSums {
  float* of_thread;

  F8_DEVICE AttentionSums(float* of_cta, u32 warpgroup, u32 floats)
      : of_thread(of_cta + warpgroup * floats + threadIdx.x % 128 * 4) {}

  // Makes the sums from vector `at` on x[i] factor, and x 0.
  template <int kCount>
  F8_DEVICE void set(float (&x)[kCount], float factor, u32 at) const {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      float* const from = x + 4 * i;
      *reinterpret_cast<float4*>(of_thread + (at + i) * 512) =
          make_float4(from[0] * factor, from[1] * factor, from[2] * factor, from[3] * factor);
      from[0] = from[1] = from[2] = from[3] = 0.0F;
    }
  }
  // Adds x[i] factor to them, and makes x 0.
  template <int kCount>
  F8_DEVICE void add(float (&x)[kCount], float factor, u32 at) const {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      float* const from = x + 4 * i;
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                       of_thread + (at + i) * 512),
                   "f"(from[0] * factor), "f"(from[1] * factor), "f"(from[2] * factor),
                   "f"(from[3] * factor)
                   : "memory");
      from[0] = from[1] = from[2] = from[3] = 0.0F;
    }
  }
  // Makes x the sum of them and x[i] factor.
  template <int kCount>
  F8_DEVICE void take(float (&x)[kCount], float factor, u32 at) const {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      float4 sum;
      asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
                   : "l"(of_thread + (at + i) * 512)
                   : "memory");
      float* const to = x + 4 * i;
      to[0] = fmaf(to[0], factor, sum.x);
      to[1] = fmaf(to[1], factor, sum.y);
      to[2] = fmaf(to[2], factor, sum.z);
      to[3] = fmaf(to[3], factor, sum.w);
    }
  }
};

// The compiler takes x for another value, so that what follows from it is computed again and not kept in registers.
F8_DEVICE u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Stores the tokens `token` and `token` + 8 of a head's gradient, as far as they lie before `end`.
template <int kCount>
F8_DEVICE void store_gradient(const AttentionGradient& to, u32 batch, u32 head, u32 token, i32 end,
                              const float (&x)[kCount], float factor0, float factor1) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (token + 8 * r >= static_cast<u32>(end)) continue;
    u16* line = to.x + batch * to.stride_batch + head * to.stride_head +
                (token + 8 * r) * to.stride_token + threadIdx.x % 4 * 2;
    const float factor = r == 0 ? factor0 : factor1;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float* from = x + 4 * i + 2 * r;
      *reinterpret_cast<u32*>(line + 8 * i) = pack_bf16(from[0] * factor, from[1] * factor);
    }
  }
}

}  // namespace f8::kernels
