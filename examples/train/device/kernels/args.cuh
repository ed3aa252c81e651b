// The parameters of the trainer's kernels are plain data, which NVRTC and the host compiler both
// compile. A pointer is to device memory, or to host memory where the host runs the kernel's
// counterpart.
//
// bf16 values travel as u16. `tokens` is a multiple of 16, and `width` (of the residual stream) of
// 64. `context` bytes precede a token; each has a slot, width / context columns of the stream.
#pragma once

#ifdef __CUDACC__
#define TRAIN_BOTH __host__ __device__ __forceinline__
#else
#define TRAIN_BOTH inline
#endif

namespace train {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

inline constexpr i32 kBytes = 256;  // the values of a byte: embeddings of a slot, logits of a token
inline constexpr float kNormEpsilon = 1e-5F;

// Gives 32 well mixed bits of a counter: a random number generator without state.
TRAIN_BOTH u32 mix(u64 x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return static_cast<u32>(x >> 32);
}

// These numbers change from step to step, and are computed ahead for all steps.
struct StepScalars {
  float lr;
  float m_correction;  // 1 / (1 - beta1^t)
  float v_correction;
  float unused;
};

// Takes `tokens` places of the text at random: the byte there, and the bytes before it. They are
// those from `first` on of the step's, which other calls or ranks take the rest of.
struct SampleArgs {
  const u8* text;
  u32 text_bytes;  // more than context
  u32 seed;
  const u32* step;
  u8* slots;    // [context][tokens]: slot 0 is the byte just before
  u8* targets;  // [tokens]
  i32 tokens;
  i32 context;
  i32 first = 0;
  i32 step_tokens = 0;  // 0: tokens
};

// h[t] = the slots' embeddings side by side.
struct EmbedArgs {
  const u16* table;  // [context][kBytes][width / context]
  const u8* slots;   // [context][tokens]
  u16* h;            // [tokens][width]
  i32 tokens;
  i32 context;
  i32 width;
};

struct EmbedGradArgs {
  const u16* dh;
  const u8* slots;
  float* dtable;  // all of it is written
  i32 tokens;
  i32 context;
  i32 width;
};

// sum = h + y; n = sum / rms(sum) * gain, over the width. Without y, sum is h and is not written.
struct NormArgs {
  const u16* h;
  const u16* y;  // or null
  u16* sum;      // [tokens][width]; null without y
  const float* gain;
  u16* n;
  float* inv_rms;  // [tokens], for NormGradArgs
  i32 tokens;
  i32 width;
};

// dh = d_residual + the gradient that dn sends through the norm of h.
struct NormGradArgs {
  const u16* dn;
  const u16* h;
  const float* gain;
  const float* inv_rms;
  const u16* d_residual;  // or null; may be dh
  u16* dh;
  float* partials;  // [blocks][width]: shares of the gain's gradient
  i32 blocks;
  i32 tokens;
  i32 width;
};

// out[c] = sum of the rows of partials[rows][width], in a fixed order.
struct SumRowsArgs {
  const float* partials;
  float* out;
  i32 rows;
  i32 width;
};

// a = gelu(u), in its tanh form.
struct GeluArgs {
  const u16* u;
  u16* a;
  i64 count;  // a multiple of 8
};

struct GeluGradArgs {
  const u16* u;
  const u16* da;
  u16* du;  // may be da
  i64 count;
};

// Gives the cross entropy of each token in nats, and the gradient of its mean over the step's tokens.
struct LossArgs {
  const u16* logits;  // [tokens][kBytes]
  const u8* targets;
  u16* dlogits;
  float* losses;  // [tokens]
  i32 tokens;
  i32 step_tokens = 0;  // those of the mean; 0: tokens
};

// partials[b] = sum of squares of chunk b of x, which is cut into `blocks` chunks.
struct SquareSumArgs {
  const float* x;
  float* partials;
  i64 count;  // a multiple of 4
  i32 blocks;
};

// Clips the gradient to a norm, takes one AdamW step, and leaves a bf16 copy of the weights.
struct AdamArgs {
  float* master;
  float* m;
  float* v;
  const float* grad;
  u16* copy;
  i64 count;              // a multiple of 4
  i64 decayed;            // the first `decayed` weights decay
  const float* partials;  // sums of the gradient's squares
  i32 partial_count;
  const StepScalars* schedule;
  const u32* step;
  float max_norm;
  float beta1;
  float beta2;
  float epsilon;
  float weight_decay;
};

// to += from.
struct AddArgs {
  const float* from;
  float* to;
  i64 count;  // a multiple of 4
};

// curve[step] = mean of losses; then the step ends.
struct FinishArgs {
  const float* losses;
  float* curve;
  u32* step;
  i32 tokens;
};

}  // namespace train
