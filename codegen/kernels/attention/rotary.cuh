// Rotary positions of queries and keys, and the gradient of it, which turns back. A block has a token of all
// heads: a thread has 8 columns of the first half of a head and the 8 that belong to them in the second half,
// and keeps their cosines and sines while it goes from head to head.
//
// Both products of an element and their sum are rounded to the type of the result, each for itself, as
// x cos + rotate_half(x) sin is by operations of PyTorch.
#pragma once

#include "codegen/kernels/attention/rotary_args.cuh"
#include "codegen/kernels/cast/rounded.cuh"

namespace f8::kernels {

// Returns x c + y s, or x c - y s. An addition of 0 makes a sum of -0 the 0 that PyTorch's gradients have.
template <Input kOut, bool kPlusZero, Input kX, Input kCos>
F8_DEVICE Vec8<kOut> turned(const Vec8<kX>& x, const Vec8<kCos>& c, const Vec8<kX>& y,
                            const Vec8<kCos>& s, bool minus) {
  float along[8];
  float across[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    along[i] = __fmul_rn(x.value(i), c.value(i));
    across[i] = __fmul_rn(minus ? -y.value(i) : y.value(i), s.value(i));
  }
  const Vec8<kOut> a = rounded<kOut>(along);
  const Vec8<kOut> b = rounded<kOut>(across);
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum[i] = __fadd_rn(a.value(i), b.value(i));
    if (kPlusZero) sum[i] = __fadd_rn(sum[i], 0.0F);
  }
  return rounded<kOut>(sum);
}

template <Input kX, Input kCos, Input kOut, bool kInverse>
F8_DEVICE void rotary(const RotaryArgs& args) {
  launch_dependents();
  grid_dependency_wait();
  constexpr int kInFlight = 4;  // heads
  const i32 half = args.head_dim / 2;
  const i32 parts = half / 8;
  const i32 column = static_cast<i32>(threadIdx.x) % parts * 8;
  const i32 lane = static_cast<i32>(threadIdx.x) / parts;
  const i32 lanes = kRotaryThreads / parts;
  if (lane >= lanes) return;
  const i64 batch = blockIdx.x / static_cast<u32>(args.tokens);
  const i64 token = blockIdx.x % static_cast<u32>(args.tokens);
  const i64 position = batch * args.cos_batch + token * args.cos_token + column;
  Vec8<kCos> cos[2];
  Vec8<kCos> sin[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    cos[i].load(args.cos, position + i * half);
    sin[i].load(args.sin, position + i * half);
  }
  const i32 heads = args.heads_q + args.heads_k;
  for (i32 head0 = lane; head0 < heads; head0 += kInFlight * lanes) {
    Vec8<kX> x[kInFlight][2];
#pragma unroll
    for (int h = 0; h < kInFlight; ++h) {
      const i32 head = head0 + h * lanes;
      if (head >= heads) continue;
      const bool is_q = head < args.heads_q;
      const RotaryHeads& of = is_q ? args.q : args.k;
      const i64 at = of.in_strides.at(batch, is_q ? head : head - args.heads_q, token) + column;
      x[h][0].load(of.in, at);
      x[h][1].load(of.in, at + half);
    }
#pragma unroll
    for (int h = 0; h < kInFlight; ++h) {
      const i32 head = head0 + h * lanes;
      if (head >= heads) continue;
      const bool is_q = head < args.heads_q;
      const RotaryHeads& of = is_q ? args.q : args.k;
      const i64 at = of.out_strides.at(batch, is_q ? head : head - args.heads_q, token) + column;
      const Vec8<kCos>& first_sin = sin[kInverse ? 1 : 0];
      const Vec8<kCos>& second_sin = sin[kInverse ? 0 : 1];
      turned<kOut, kInverse>(x[h][0], cos[0], x[h][1], first_sin, !kInverse).store(of.out, at);
      turned<kOut, kInverse>(x[h][1], cos[1], x[h][0], second_sin, kInverse)
          .store(of.out, at + half);
    }
  }
}

}  // namespace f8::kernels
