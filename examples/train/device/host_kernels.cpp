#include "device/host_kernels.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "device/bf16.hpp"

namespace train::host {
namespace {

// Gives sigmoid(2 z) of the tanh form of GELU: gelu(u) = u sigmoid(2 z), z = c (u + d u^3).
constexpr float kGeluInner = 0.7978845608F;
constexpr float kGeluCube = 0.044715F;
float gelu_sigmoid(float u) {
  return 1.0F / (1.0F + std::exp(-2.0F * kGeluInner * u * (1.0F + kGeluCube * u * u)));
}

}  // namespace

void run(const SampleArgs& args) {
  const u32 places = args.text_bytes - static_cast<u32>(args.context);
  for (i32 token = 0; token < args.tokens; ++token) {
    const i32 step_tokens = args.step_tokens == 0 ? args.tokens : args.step_tokens;
    const u64 counter = static_cast<u64>(*args.step) * static_cast<u64>(step_tokens) +
                        static_cast<u64>(args.first + token);
    const u64 random = mix((static_cast<u64>(args.seed) << 40) + counter + 1);
    const u8* at = args.text + args.context + ((random * places) >> 32);
    args.targets[token] = *at;
    for (i32 slot = 0; slot < args.context; ++slot) {
      args.slots[i64{slot} * args.tokens + token] = *(at - 1 - slot);
    }
  }
}

void run(const EmbedArgs& args) {
  const i32 slot_width = args.width / args.context;
  for (i32 token = 0; token < args.tokens; ++token) {
    for (i32 slot = 0; slot < args.context; ++slot) {
      const i64 value = args.slots[i64{slot} * args.tokens + token];
      std::copy_n(args.table + (i64{slot} * kBytes + value) * slot_width, slot_width,
                  args.h + i64{token} * args.width + i64{slot} * slot_width);
    }
  }
}

void run(const EmbedGradArgs& args) {
  const i32 slot_width = args.width / args.context;
  std::fill_n(args.dtable, i64{kBytes} * args.width, 0.0F);
  for (i32 token = 0; token < args.tokens; ++token) {
    for (i32 slot = 0; slot < args.context; ++slot) {
      const i64 value = args.slots[i64{slot} * args.tokens + token];
      float* row = args.dtable + (i64{slot} * kBytes + value) * slot_width;
      const u16* dh = args.dh + i64{token} * args.width + i64{slot} * slot_width;
      for (i32 c = 0; c < slot_width; ++c) row[c] += decode_bf16(dh[c]);
    }
  }
}

void run(const NormArgs& args) {
  std::vector<float> row(static_cast<size_t>(args.width));
  for (i32 token = 0; token < args.tokens; ++token) {
    const i64 first = i64{token} * args.width;
    float squares = 0;
    for (i32 c = 0; c < args.width; ++c) {
      float x = decode_bf16(args.h[first + c]);
      if (args.y != nullptr) {
        args.sum[first + c] = encode_bf16(x + decode_bf16(args.y[first + c]));
        x = decode_bf16(args.sum[first + c]);
      }
      row[static_cast<size_t>(c)] = x;
      squares += x * x;
    }
    const float inv_rms = 1.0F / std::sqrt(squares / static_cast<float>(args.width) + kNormEpsilon);
    args.inv_rms[token] = inv_rms;
    for (i32 c = 0; c < args.width; ++c) {
      args.n[first + c] = encode_bf16(row[static_cast<size_t>(c)] * (inv_rms * args.gain[c]));
    }
  }
}

void run(const NormGradArgs& args) {
  std::fill_n(args.partials, i64{args.blocks} * args.width, 0.0F);
  for (i32 token = 0; token < args.tokens; ++token) {
    const i64 first = i64{token} * args.width;
    const float inv_rms = args.inv_rms[token];
    float* d_gain = args.partials + i64{token % args.blocks} * args.width;
    float product = 0;
    for (i32 c = 0; c < args.width; ++c) {
      const float dz = decode_bf16(args.dn[first + c]) * decode_bf16(args.h[first + c]) * inv_rms;
      d_gain[c] += dz;
      product += dz * args.gain[c];
    }
    const float mean = product / static_cast<float>(args.width);
    for (i32 c = 0; c < args.width; ++c) {
      const float d = decode_bf16(args.dn[first + c]) * args.gain[c];
      const float z = decode_bf16(args.h[first + c]) * inv_rms;
      const float residual =
          args.d_residual == nullptr ? 0.0F : decode_bf16(args.d_residual[first + c]);
      args.dh[first + c] = encode_bf16(residual + inv_rms * (d - z * mean));
    }
  }
}

void run(const SumRowsArgs& args) {
  std::fill_n(args.out, args.width, 0.0F);
  for (i32 row = 0; row < args.rows; ++row) {
    for (i32 c = 0; c < args.width; ++c) args.out[c] += args.partials[i64{row} * args.width + c];
  }
}

void run(const GeluArgs& args) {
  for (i64 i = 0; i < args.count; ++i) {
    const float u = decode_bf16(args.u[i]);
    args.a[i] = encode_bf16(u * gelu_sigmoid(u));
  }
}

void run(const GeluGradArgs& args) {
  for (i64 i = 0; i < args.count; ++i) {
    const float u = decode_bf16(args.u[i]);
    const float s = gelu_sigmoid(u);
    const float slope = 2.0F * kGeluInner * (1.0F + 3.0F * kGeluCube * u * u);
    args.du[i] = encode_bf16(decode_bf16(args.da[i]) * (s + u * s * (1.0F - s) * slope));
  }
}

void run(const LossArgs& args) {
  float x[kBytes];
  const auto step_tokens =
      static_cast<float>(args.step_tokens == 0 ? args.tokens : args.step_tokens);
  for (i32 token = 0; token < args.tokens; ++token) {
    const i64 first = i64{token} * kBytes;
    for (i32 i = 0; i < kBytes; ++i) x[i] = decode_bf16(args.logits[first + i]);
    const float most = *std::ranges::max_element(x);
    const float wanted = x[args.targets[token]] - most;
    float sum = 0;
    for (float& logit : x) sum += logit = std::exp(logit - most);
    args.losses[token] = std::log(sum) - wanted;
    for (i32 i = 0; i < kBytes; ++i) {
      const float hit = i == args.targets[token] ? 1.0F : 0.0F;
      args.dlogits[first + i] = encode_bf16((x[i] / sum - hit) / step_tokens);
    }
  }
}

void run(const SquareSumArgs& args) {
  const i64 chunk = (args.count / 4 + args.blocks - 1) / args.blocks * 4;
  for (i64 block = 0; block < args.blocks; ++block) {
    float sum = 0;
    const i64 end = std::min(chunk * (block + 1), args.count);
    for (i64 i = chunk * block; i < end; ++i) sum += args.x[i] * args.x[i];
    args.partials[block] = sum;
  }
}

void run(const AddArgs& args) {
  for (i64 i = 0; i < args.count; ++i) args.to[i] += args.from[i];
}

void run(const AdamArgs& args) {
  float square = 0;
  for (i32 i = 0; i < args.partial_count; ++i) square += args.partials[i];
  const float norm = std::sqrt(square);
  const float clip = norm > args.max_norm ? args.max_norm / norm : 1.0F;
  const StepScalars& now = args.schedule[*args.step];
  for (i64 i = 0; i < args.count; ++i) {
    const float grad = args.grad[i] * clip;
    float& m = args.m[i];
    float& v = args.v[i];
    float& w = args.master[i];
    m = args.beta1 * m + (1.0F - args.beta1) * grad;
    v = args.beta2 * v + (1.0F - args.beta2) * grad * grad;
    const float direction = m * now.m_correction / (std::sqrt(v * now.v_correction) + args.epsilon);
    w -= now.lr * (direction + (i < args.decayed ? args.weight_decay : 0.0F) * w);
    args.copy[i] = encode_bf16(w);
  }
}

void run(const FinishArgs& args) {
  float sum = 0;
  for (i32 i = 0; i < args.tokens; ++i) sum += args.losses[i];
  args.curve[*args.step] = sum / static_cast<float>(args.tokens);
  *args.step += 1;
}

}  // namespace train::host
