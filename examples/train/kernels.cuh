// The kernels of the model, each written once: NVRTC compiles this text for the GPU, and the host compiler
// compiles it for the emulated device. A block of threads computes an item, such as a token: each thread has
// what is at lane() and every kLanes behind it. On the host one thread computes all of it. No sum depends on
// chance, so a seed always gives the same bits. bf16 values travel as u16.
#pragma once

#ifdef __CUDACC__
#define FUNCTION __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define ITEM_OF_BLOCK(item) item = blockIdx.x
#else
#include <cmath>
#include <cstring>
#define FUNCTION inline
#define KERNEL inline void
#define ITEM_OF_BLOCK(item) (void)item
#endif

namespace train {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr i64 kBytes = 256;   // the values of a byte: embeddings of a slot, logits of a token
constexpr i64 kShares = 512;  // parts of the sum over tokens that is the gradient of a gain
constexpr i64 kChunk = 2048;  // elements of an item that is no token or row

#ifdef __CUDACC__
constexpr int kLanes = 256;
FUNCTION int lane() {
  return static_cast<int>(threadIdx.x);
}

// Gives all threads of the block what `join` makes of their values, in a fixed order.
template <class Join>
FUNCTION float over_block(float x, const Join& join) {
  __shared__ float of_warp[kLanes / 32];
  for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, step));
  __syncthreads();  // the previous call's values are read
  if (lane() % 32 == 0) of_warp[lane() / 32] = x;
  __syncthreads();
  x = of_warp[0];
  for (int warp = 1; warp < kLanes / 32; ++warp) x = join(x, of_warp[warp]);
  return x;
}
#else
constexpr int kLanes = 1;
inline int lane() {
  return 0;
}
template <class Join>
float over_block(float x, const Join&) {
  return x;
}
#endif

FUNCTION float to_float(u16 bf16) {
  const u32 bits = u32{bf16} << 16;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
FUNCTION u16 to_bf16(float x) {
  u32 bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // NaN
  return static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
FUNCTION float sigmoid(float x) {
  return 1.0F / (1.0F + expf(-x));
}
FUNCTION float block_sum(float x) {
  return over_block(x, [](float a, float b) { return a + b; });
}
FUNCTION i64 chunk_end(i64 chunk, i64 count) {
  return (chunk + 1) * kChunk < count ? (chunk + 1) * kChunk : count;
}

// Gives 32 well mixed bits of a counter: a random number generator without state.
FUNCTION u32 mix(u64 x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return static_cast<u32>(x >> 32);
}

// Takes a place of the text at random for each token: the byte there is the target, and h has the
// embeddings of the `context` bytes before it side by side. Slot 0 is the byte just before. `seed` and
// `counter` decide the places, the first token's with this counter.
//   table[context][kBytes][width / context]  slots[context][tokens]  targets[tokens]  h[tokens][width]
KERNEL embed(i64 token, const u8* text, u64 places, u64 seed, i64 counter, const u16* table,
             u8* slots, u8* targets, u16* h, i64 tokens, i64 context, i64 width) {
  ITEM_OF_BLOCK(token);
  const u64 random = mix((seed << 40) + static_cast<u64>(counter + token) + 1);
  const u8* at = text + context + (random * places >> 32);
  if (lane() == 0) targets[token] = *at;
  const i64 slot_width = width / context;
  for (i64 c = lane(); c < width; c += kLanes) {
    const i64 slot = c / slot_width, column = c % slot_width;
    const u8 byte = *(at - 1 - slot);
    if (column == 0) slots[slot * tokens + token] = byte;
    h[token * width + c] = table[(slot * kBytes + byte) * slot_width + column];
  }
}

// The gradient of the embedding of a byte in a slot is the sum over the tokens that have it.
KERNEL embed_grad(i64 entry, const u16* dh, const u8* slots, float* dtable, i64 tokens, i64 width,
                  i64 slot_width) {
  ITEM_OF_BLOCK(entry);
  const u8* const bytes = slots + entry / kBytes * tokens;
  const u16* const d = dh + entry / kBytes * slot_width;
  const u64 ones = 0x0101010101010101, wanted = ones * static_cast<u64>(entry % kBytes);
  for (i64 c = lane(); c < slot_width; c += kLanes) {
    float sum = 0;
    for (i64 token = 0; token < tokens; token += 8) {
      const u64 x = *reinterpret_cast<const u64*>(bytes + token) ^ wanted;
      if (((x - ones) & ~x & (ones << 7)) == 0) continue;  // none of the eight
      for (i64 t = token; t < token + 8; ++t) {
        if (bytes[t] == entry % kBytes) sum += to_float(d[t * width + c]);
      }
    }
    dtable[entry * slot_width + c] = sum;
  }
}

// h = before + y, unless y is null, where h is there; n = h / rms(h) * gain.
KERNEL rms_norm(i64 token, const u16* before, const u16* y, u16* h, const float* gain, u16* n,
                float* inv_rms, i64 width) {
  ITEM_OF_BLOCK(token);
  const i64 row = token * width;
  float squares = 0;
  for (i64 c = lane(); c < width; c += kLanes) {
    if (y != nullptr) h[row + c] = to_bf16(to_float(before[row + c]) + to_float(y[row + c]));
    const float x = to_float(h[row + c]);
    squares += x * x;
  }
  const float inverse = 1.0F / sqrtf(block_sum(squares) / static_cast<float>(width) + 1e-5F);
  if (lane() == 0) inv_rms[token] = inverse;
  for (i64 c = lane(); c < width; c += kLanes) {
    n[row + c] = to_bf16(to_float(h[row + c]) * inverse * gain[c]);
  }
}

// dh = d_residual + inv_rms (g - z mean(g z)), where z = h inv_rms and g = gain dn; d_residual is null or
// dh. The gradient of the gain is the sum over tokens of dn z: an item leaves its share [width] of that.
KERNEL rms_norm_grad(i64 share, const u16* dn, const u16* h, const float* gain,
                     const float* inv_rms, const u16* d_residual, u16* dh, float* shares,
                     i64 tokens, i64 width) {
  ITEM_OF_BLOCK(share);
  float* const d_gain = shares + share * width;
  for (i64 c = lane(); c < width; c += kLanes) d_gain[c] = 0;
  for (i64 token = share; token < tokens; token += kShares) {
    const i64 row = token * width;
    const float inverse = inv_rms[token];
    float product = 0;
    for (i64 c = lane(); c < width; c += kLanes) {
      const float dz = to_float(dn[row + c]) * to_float(h[row + c]) * inverse;
      d_gain[c] += dz;
      product += dz * gain[c];
    }
    const float mean = block_sum(product) / static_cast<float>(width);
    for (i64 c = lane(); c < width; c += kLanes) {
      const float g = to_float(dn[row + c]) * gain[c], z = to_float(h[row + c]) * inverse;
      const float residual = d_residual == nullptr ? 0.0F : to_float(d_residual[row + c]);
      dh[row + c] = to_bf16(residual + inverse * (g - z * mean));
    }
  }
}

KERNEL sum_shares(i64 column, const float* shares, float* out, i64 width) {
  ITEM_OF_BLOCK(column);
  float sum = 0;
  for (i64 share = lane(); share < kShares; share += kLanes) sum += shares[share * width + column];
  sum = block_sum(sum);
  if (lane() == 0) out[column] = sum;
}

// GELU in its tanh form: a = u sigmoid(z) with z = kGeluInner (u + kGeluCube u^3).
constexpr float kGeluInner = 2 * 0.7978845608F, kGeluCube = 0.044715F;
KERNEL gelu(i64 chunk, i64 count, const u16* __restrict__ u, u16* __restrict__ a) {
  ITEM_OF_BLOCK(chunk);
  for (i64 i = chunk * kChunk + lane(); i < chunk_end(chunk, count); i += kLanes) {
    const float x = to_float(u[i]);
    a[i] = to_bf16(x * sigmoid(kGeluInner * x * (1.0F + kGeluCube * x * x)));
  }
}

// d goes from the gradient of a to that of u.
KERNEL gelu_grad(i64 chunk, i64 count, const u16* __restrict__ u, u16* __restrict__ d) {
  ITEM_OF_BLOCK(chunk);
  for (i64 i = chunk * kChunk + lane(); i < chunk_end(chunk, count); i += kLanes) {
    const float x = to_float(u[i]), cube = kGeluCube * x * x;
    const float s = sigmoid(kGeluInner * x * (1.0F + cube));
    const float slope = s + x * s * (1.0F - s) * kGeluInner * (1.0F + 3.0F * cube);
    d[i] = to_bf16(to_float(d[i]) * slope);
  }
}

// The cross entropy of a token in nats, and the gradient of its mean over the step's tokens.
KERNEL loss(i64 token, const u16* logits, const u8* targets, u16* dlogits, float* losses,
            i64 step_tokens) {
  ITEM_OF_BLOCK(token);
  const u16* const x = logits + token * kBytes;
  float most = to_float(x[lane()]), total = 0;
  for (i64 i = lane(); i < kBytes; i += kLanes) most = fmaxf(most, to_float(x[i]));
  most = over_block(most, [](float a, float b) { return fmaxf(a, b); });
  for (i64 i = lane(); i < kBytes; i += kLanes) total += expf(to_float(x[i]) - most);
  total = block_sum(total);
  const i64 target = targets[token];
  if (lane() == 0) losses[token] = logf(total) - (to_float(x[target]) - most);
  for (i64 i = lane(); i < kBytes; i += kLanes) {
    const float p = expf(to_float(x[i]) - most) / total;
    const float d = (p - (i == target ? 1.0F : 0.0F)) / static_cast<float>(step_tokens);
    dlogits[token * kBytes + i] = to_bf16(d);
  }
}

KERNEL add(i64 chunk, i64 count, const float* __restrict__ from, float* __restrict__ to) {
  ITEM_OF_BLOCK(chunk);
  for (i64 i = chunk * kChunk + lane(); i < chunk_end(chunk, count); i += kLanes) to[i] += from[i];
}

// out[row] = factor times the sum of a row's values, or of their squares.
KERNEL row_sums(i64 row, const float* x, i64 width, bool squares, float factor, float* out) {
  ITEM_OF_BLOCK(row);
  float sum = 0;
  for (i64 c = lane(); c < width; c += kLanes) {
    const float value = x[row * width + c];
    sum += squares ? value * value : value;
  }
  sum = block_sum(sum);
  if (lane() == 0) out[row] = sum * factor;
}

// AdamW. The gradient has this sum of squares, and is clipped to a norm of 1. `copy` has the weights in bf16.
// Those before `decayed` decay. The corrections are 1 / (1 - beta^t) in step t.
constexpr float kBeta1 = 0.9F, kBeta2 = 0.95F;
KERNEL adamw(i64 chunk, i64 count, const float* squares, float lr, float m_correction,
             float v_correction, const float* __restrict__ grad, float* __restrict__ master,
             float* __restrict__ m, float* __restrict__ v, u16* __restrict__ copy, i64 decayed) {
  ITEM_OF_BLOCK(chunk);
  const float clip = *squares > 1.0F ? 1.0F / sqrtf(*squares) : 1.0F;
  for (i64 i = chunk * kChunk + lane(); i < chunk_end(chunk, count); i += kLanes) {
    const float d = grad[i] * clip, w = master[i];
    m[i] = kBeta1 * m[i] + (1.0F - kBeta1) * d;
    v[i] = kBeta2 * v[i] + (1.0F - kBeta2) * d * d;
    const float direction = m[i] * m_correction / (sqrtf(v[i] * v_correction) + 1e-8F);
    master[i] = w - lr * (direction + (i < decayed ? 0.1F * w : 0.0F));
    copy[i] = to_bf16(master[i]);
  }
}

}  // namespace train
