// The casts of attention (attention_cast.cuh), to the same bits: sums of k are added in that order.
#include <algorithm>
#include <bit>
#include <vector>

#include "codegen/kernels/attention/attention_args.cuh"
#include "recipes/dtype.hpp"
#include "recipes/scale.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

using codegen::AttentionStep;
constexpr int64_t kBlockTokens = kernels::kAttentionTile;

// The heads of a batch of an operand.
struct Heads {
  const kernels::AttentionOperand& of;
  int64_t d;

  [[nodiscard]] int64_t blocks() const { return kernels::attention_blocks(of.tokens); }
  [[nodiscard]] int64_t at(int64_t row, int64_t token, int64_t column) const {
    return row / of.heads * of.stride_batch + row % of.heads * of.stride_head +
           token * of.stride_token + column;
  }
  // The index of an element of the copy, transposed or not.
  [[nodiscard]] int64_t in_copy(int64_t row, int64_t token, int64_t column, bool transposed) const {
    if (!transposed) return (row * blocks() * kBlockTokens + token) * d + column;
    const auto in_tile = static_cast<int32_t>(token % kBlockTokens);
    return (row * d + column) * blocks() * kBlockTokens + token - in_tile +
           kernels::fragment_place(in_tile);
  }
};

void sum_keys(const Heads& k, int64_t rows, float* sums) {
  const int64_t slabs = kernels::attention_slabs(k.of.tokens);
  const int64_t at_a_time = kernels::kTileThreads / (k.d / 8);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t slab = 0; slab < slabs; ++slab) {
      const int64_t first = slab * kernels::kAttentionSlab;
      const int64_t end = std::min<int64_t>(k.of.tokens, first + kernels::kAttentionSlab);
      for (int64_t c = 0; c < k.d; ++c) {
        float total = 0;
        for (int64_t r = 0; r < at_a_time; ++r) {
          float sum = 0;
          for (int64_t token = first + r; token < end; token += at_a_time) {
            sum += decode_bf16(k.of.x[k.at(row, token, c)]);
          }
          total += sum;
        }
        sums[(row * slabs + slab) * k.d + c] = total;
      }
    }
  }
}

std::vector<float> mean_of(const Heads& k, int64_t row, const float* sums) {
  const int64_t slabs = kernels::attention_slabs(k.of.tokens);
  std::vector<float> mean(static_cast<size_t>(k.d));
  for (int64_t c = 0; c < k.d; ++c) {
    float sum = 0;
    for (int64_t slab = 0; slab < slabs; ++slab) sum += sums[(row * slabs + slab) * k.d + c];
    mean[static_cast<size_t>(c)] = sum / static_cast<float>(k.of.tokens);
  }
  return mean;
}

// The 128 tokens of a block of a head. An empty mean is one of zeros.
void cast_block(const Heads& heads, int64_t row, int64_t block, const std::vector<float>& mean,
                bool transposed) {
  std::vector<float> x(static_cast<size_t>(kBlockTokens * heads.d));
  float amax = 0;
  for (int64_t t = 0; t < kBlockTokens && block * kBlockTokens + t < heads.of.tokens; ++t) {
    for (int64_t c = 0; c < heads.d; ++c) {
      float& value = x[static_cast<size_t>(t * heads.d + c)];
      value = decode_bf16(heads.of.x[heads.at(row, block * kBlockTokens + t, c)]);
      if (!mean.empty()) value -= mean[static_cast<size_t>(c)];
      amax = std::bit_cast<float>(
          std::max(std::bit_cast<uint32_t>(amax), std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU));
    }
  }
  const float scale = scale_from_amax(amax, Dtype::kE4m3, true);
  heads.of.inv_scale[row * heads.blocks() + block] = 1.0F / scale;
  for (int64_t t = 0; t < kBlockTokens; ++t) {
    for (int64_t c = 0; c < heads.d; ++c) {
      heads.of.copy[heads.in_copy(row, block * kBlockTokens + t, c, transposed)] =
          encode_fp8(x[static_cast<size_t>(t * heads.d + c)] * scale, Dtype::kE4m3);
    }
  }
}

void dequantize_block(const Heads& heads, int64_t row, int64_t block, bool transposed) {
  const float inverse = heads.of.inv_scale[row * heads.blocks() + block];
  for (int64_t token = block * kBlockTokens;
       token < std::min<int64_t>((block + 1) * kBlockTokens, heads.of.tokens); ++token) {
    for (int64_t c = 0; c < heads.d; ++c) {
      const uint8_t byte = heads.of.copy[heads.in_copy(row, token, c, transposed)];
      heads.of.x[heads.at(row, token, c)] = encode_bf16(decode_fp8(byte, Dtype::kE4m3) * inverse);
    }
  }
}

bool is_fit(const kernels::AttentionCastArgs& args, const codegen::AttentionCastSpec& spec,
            const Call& call) {
  const std::pair<const char*, const kernels::AttentionOperand*> operands[] = {
      {"q", &args.q}, {"k", &args.k}, {"v", &args.v}};
  for (const auto& [name, operand] : operands) {
    if (operand->x == nullptr || operand->copy == nullptr || operand->inv_scale == nullptr ||
        operand->tokens < 1 || operand->heads < 1 || args.batch < 1) {
      call.fault("{}: {} has {} tokens, {} heads, a batch of {}, or a null array", call.module.key,
                 name, operand->tokens, operand->heads, args.batch);
    }
  }
  if (spec.step != AttentionStep::kDequantize && args.sums == nullptr) {
    call.fault("{}: the sums are null", call.module.key);
  }
  const auto blocks = [&](const kernels::AttentionOperand& of) {
    return int64_t{kernels::attention_blocks(of.tokens)} * of.heads * args.batch;
  };
  const int64_t expected =
      spec.step == AttentionStep::kSumKeys
          ? int64_t{kernels::attention_slabs(args.k.tokens)} * args.k.heads * args.batch
          : blocks(args.q) + blocks(args.k) + blocks(args.v);
  if (call.launch.grid != expected) {
    call.fault("{}: {} blocks are launched, and {} are needed", call.module.key, call.launch.grid,
               expected);
  }
  return call.faults.empty();
}

}  // namespace

void emulate(const codegen::AttentionCastSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::AttentionCastArgs>();
  if (!is_fit(args, spec, call)) return;
  const int64_t d = spec.head_dim;
  if (spec.step == AttentionStep::kSumKeys) {
    sum_keys({args.k, d}, int64_t{args.batch} * args.k.heads, args.sums);
    return;
  }
  for (const kernels::AttentionOperand* operand : {&args.q, &args.k, &args.v}) {
    const Heads heads{*operand, d};
    const bool transposed = operand == &args.v;
    for (int64_t row = 0; row < int64_t{args.batch} * operand->heads; ++row) {
      std::vector<float> mean;
      if (operand == &args.k && spec.step == AttentionStep::kCast) {
        mean = mean_of(heads, row, args.sums);
      }
      for (int64_t block = 0; block < heads.blocks(); ++block) {
        if (spec.step == AttentionStep::kCast) {
          cast_block(heads, row, block, mean, transposed);
        } else {
          dequantize_block(heads, row, block, transposed);
        }
      }
    }
  }
}

}  // namespace f8::runtime::emulation
