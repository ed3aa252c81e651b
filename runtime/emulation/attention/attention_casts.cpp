// The casts of attention (attention_cast.cuh), to the same bits: sums of k are added in that order.
#include <algorithm>
#include <bit>
#include <vector>

#include "recipes/dtype.hpp"
#include "recipes/scales/scale.hpp"
#include "runtime/emulation/attention/attention_heads.hpp"

namespace f8::runtime::emulation {
namespace {

using codegen::AttentionStep;
constexpr int64_t kBlockTokens = kernels::kAttentionTile;

using kernels::AttentionBlock;

using Heads = AttentionHeads;

// Where the sums of the slab are that begins with a block: a pack has room for one a block.
int64_t sums_of(const Heads& k, int64_t row, int64_t block) {
  const int64_t place =
      k.packed ? row * k.count() + block : row * kernels::attention_slabs(k.of.tokens) + block / 2;
  return place * k.d;
}

// What a cast's Args say in addition to those of a batch, or null.
const kernels::AttentionPackedCastArgs* packed_of(const codegen::AttentionCastSpec& spec,
                                                  const Call& call) {
  return spec.packed ? &call.args<kernels::AttentionPackedCastArgs>() : nullptr;
}

void sum_keys(const Heads& k, int64_t rows, float* sums) {
  const int64_t at_a_time = kernels::kTileThreads / (k.d / 8);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t b = 0; b < k.count(); ++b) {
      const AttentionBlock& block = k.blocks[static_cast<size_t>(b)];
      if (block.tokens == 0 || block.index % 2 != 0) continue;
      const int64_t left = block.keys - block.index * kBlockTokens;
      const int64_t end = block.token + std::min<int64_t>(left, kernels::kAttentionSlab);
      for (int64_t c = 0; c < k.d; ++c) {
        float total = 0;
        for (int64_t r = 0; r < at_a_time; ++r) {
          float sum = 0;
          for (int64_t token = block.token + r; token < end; token += at_a_time) {
            sum += decode_bf16(k.of.x[k.at(row, token, c)]);
          }
          total += sum;
        }
        sums[sums_of(k, row, b) + c] = total;
      }
    }
  }
}

// The mean of the keys of a block's sequence.
std::vector<float> mean_of(const Heads& k, int64_t row, const AttentionBlock& block,
                           const float* sums) {
  std::vector<float> mean(static_cast<size_t>(k.d));
  for (int64_t c = 0; c < k.d; ++c) {
    float sum = 0;
    for (int64_t slab = 0; slab < kernels::attention_slabs(block.keys); ++slab) {
      sum += sums[sums_of(k, row, block.first + 2 * slab) + c];
    }
    mean[static_cast<size_t>(c)] = sum / static_cast<float>(block.keys);
  }
  return mean;
}

// The 128 tokens of a block of a head. An empty mean is one of zeros.
void cast_block(const Heads& heads, int64_t row, int64_t at, const std::vector<float>& mean,
                bool transposed) {
  const AttentionBlock& block = heads.blocks[static_cast<size_t>(at)];
  std::vector<float> x(static_cast<size_t>(kBlockTokens * heads.d));
  float amax = 0;
  for (int64_t t = 0; t < block.tokens; ++t) {
    for (int64_t c = 0; c < heads.d; ++c) {
      float& value = x[static_cast<size_t>(t * heads.d + c)];
      value = decode_bf16(heads.of.x[heads.at(row, block.token + t, c)]);
      if (!mean.empty()) value -= mean[static_cast<size_t>(c)];
      amax = std::bit_cast<float>(
          std::max(std::bit_cast<uint32_t>(amax), std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU));
    }
  }
  const float scale = scale_from_amax(amax, Dtype::kE4m3, true);
  heads.of.inv_scale[row * heads.count() + at] = 1.0F / scale;
  for (int32_t t = 0; t < kBlockTokens; ++t) {
    for (int64_t c = 0; c < heads.d; ++c) {
      heads.of.copy[heads.in_copy(row, at, t, c, transposed)] =
          encode_fp8(x[static_cast<size_t>(t * heads.d + c)] * scale, Dtype::kE4m3);
    }
  }
}

void dequantize_block(const Heads& heads, int64_t row, int64_t at, bool transposed) {
  const AttentionBlock& block = heads.blocks[static_cast<size_t>(at)];
  const float inverse = heads.of.inv_scale[row * heads.count() + at];
  for (int32_t t = 0; t < block.tokens; ++t) {
    for (int64_t c = 0; c < heads.d; ++c) {
      const uint8_t byte = heads.of.copy[heads.in_copy(row, at, t, c, transposed)];
      heads.of.x[heads.at(row, block.token + t, c)] =
          encode_bf16(decode_fp8(byte, Dtype::kE4m3) * inverse);
    }
  }
}

// Makes the caller's offsets those of sequences, and returns the index of the first one that was another, or -1.
int32_t clean_offsets(const int32_t* from, int32_t sequences, int32_t tokens, int32_t* to) {
  int32_t bad = -1;
  for (int32_t i = 0; i <= sequences; ++i) {
    to[i] = i == 0           ? 0
            : i == sequences ? tokens
                             : std::max(to[i - 1], std::clamp(from[i], 0, tokens));
    if (bad < 0 && to[i] != from[i]) bad = i;
  }
  return bad;
}

void lay_out(const kernels::AttentionPackedCastArgs& args) {
  using kernels::attention_packed_blocks, kernels::kAttentionTile;
  int32_t* const of_q = args.offsets;
  int32_t* const of_k = of_q + args.sequences + 1;
  const int32_t bad[] = {clean_offsets(args.offsets_q, args.sequences, args.q.tokens, of_q),
                         clean_offsets(args.offsets_k, args.sequences, args.k.tokens, of_k)};
  const int32_t longest[] = {args.longest_q, args.longest_k};
  int32_t too_long[] = {-1, -1};
  for (int32_t s = 0; s < args.sequences; ++s) {
    for (const int32_t* of : {of_q, of_k}) {
      const int which = of == of_q ? 0 : 1;
      const bool is_long = longest[which] > 0 && of[s + 1] - of[s] > longest[which];
      if (is_long && too_long[which] < 0) too_long[which] = s;
    }
    for (const auto& [blocks, offsets] :
         {std::pair{args.blocks_q, of_q + s}, std::pair{args.blocks_k, of_k + s}}) {
      const int32_t first = attention_packed_blocks(offsets[0], s);
      for (int32_t i = 0; first + i < attention_packed_blocks(offsets[1], s + 1); ++i) {
        const int32_t tokens =
            std::clamp(offsets[1] - offsets[0] - i * kAttentionTile, 0, kAttentionTile);
        blocks[first + i] = {offsets[0] + i * kAttentionTile,
                             tokens,
                             i,
                             of_k[s + 1] - of_k[s],
                             attention_packed_blocks(of_k[s], s),
                             of_q[s + 1] - of_q[s],
                             attention_packed_blocks(of_q[s], s),
                             0};
      }
    }
  }
  if (args.error == nullptr || args.error[0] != kernels::kNoPackError) return;
  const auto keep = [&](int32_t error, const int32_t(&first)[2]) {
    const int32_t which = first[0] >= 0 ? 0 : 1;
    if (first[which] < 0) return false;
    args.error[0] = error + which;
    args.error[1] = first[which];
    return true;
  };
  if (!keep(kernels::kBadOffset, bad)) keep(kernels::kLongSequence, too_long);
}

bool is_fit(const kernels::AttentionCastArgs& args, const codegen::AttentionCastSpec& spec,
            const Call& call) {
  const std::pair<const char*, const kernels::AttentionOperand*> operands[] = {
      {"q", &args.q}, {"k", &args.k}, {"v", &args.v}};
  const bool backward = spec.step == AttentionStep::kBackwardCast;
  const bool layout = spec.step == AttentionStep::kLayout;  // which reads how many tokens there are
  for (const auto& [name, operand] : operands) {
    if (layout && operand == &args.v) continue;
    const bool has_arrays = (operand->x != nullptr || backward) && operand->copy != nullptr &&
                            operand->inv_scale != nullptr && operand->heads >= 1;
    if ((!has_arrays && !layout) || operand->tokens < 1 || args.batch < 1) {
      call.fault("{}: {} has {} tokens, {} heads, a batch of {}, or a null array", call.module.key,
                 name, operand->tokens, operand->heads, args.batch);
    }
  }
  if (spec.step != AttentionStep::kDequantize && !backward && !layout && args.sums == nullptr) {
    call.fault("{}: the sums are null", call.module.key);
  }
  const auto* const packed = packed_of(spec, call);
  if (packed != nullptr &&
      (packed->blocks_q == nullptr || packed->blocks_k == nullptr || packed->offsets == nullptr ||
       packed->sequences < 1 || args.batch != 1 ||
       (layout && (packed->offsets_q == nullptr || packed->offsets_k == nullptr)))) {
    call.fault("{}: {} sequences in a batch of {}, or a null array", call.module.key,
               packed->sequences, args.batch);
  }
  if (call.faults.empty() && packed != nullptr && !layout &&
      !(are_offsets(packed->offsets, packed->sequences, args.q.tokens) &&
        are_offsets(packed->offsets + packed->sequences + 1, packed->sequences, args.k.tokens))) {
    call.fault(
        "{}: saved does not have {} sequences of {} queries and {} keys; its sizes are those of "
        "the forward that filled it",
        call.module.key, packed->sequences, args.q.tokens, args.k.tokens);
  }
  const auto blocks = [&](const kernels::AttentionOperand& of) {
    return (packed != nullptr ? kernels::attention_packed_blocks(of.tokens, packed->sequences)
                              : kernels::attention_blocks(of.tokens)) *
           int64_t{of.heads} * args.batch;
  };
  const int64_t slabs = packed != nullptr ? blocks(args.k)
                                          : int64_t{kernels::attention_slabs(args.k.tokens)} *
                                                args.k.heads * args.batch;
  const int64_t expected = layout ? 1
                           : spec.step == AttentionStep::kSumKeys
                               ? slabs
                               : (backward ? 2 : 1) * blocks(args.q) + 2 * blocks(args.k);
  if (call.launch.grid != expected) {
    call.fault("{}: {} blocks are launched, and {} are needed", call.module.key, call.launch.grid,
               expected);
  }
  return call.faults.empty();
}

}  // namespace

Heads attention_heads(const codegen::AttentionCastSpec& spec, const Call& call,
                      const kernels::AttentionOperand& of, bool of_keys) {
  Heads heads{of, spec.head_dim, {}, spec.packed};
  if (const auto* packed = packed_of(spec, call)) {
    const AttentionBlock* from = of_keys ? packed->blocks_k : packed->blocks_q;
    heads.blocks.assign(from,
                        from + kernels::attention_packed_blocks(of.tokens, packed->sequences));
    return heads;
  }
  for (int32_t i = 0; i < kernels::attention_blocks(of.tokens); ++i) {
    heads.blocks.push_back(block_of_batch(i, of.tokens, of.tokens, of.tokens));
  }
  return heads;
}

void emulate(const codegen::AttentionCastSpec& spec, const Call& call) {
  if (spec.is_beside_library()) {
    return call.fault("{}: it is for a library of a GPU", call.module.key);
  }
  const auto& args = call.args<kernels::AttentionCastArgs>();
  if (!is_fit(args, spec, call)) return;
  if (spec.step == AttentionStep::kLayout) return lay_out(*packed_of(spec, call));
  if (spec.step == AttentionStep::kBackwardCast) return emulate_backward_cast(spec, call);
  if (spec.step == AttentionStep::kSumKeys) {
    const Heads k = attention_heads(spec, call, args.k, true);
    return sum_keys(k, int64_t{args.batch} * args.k.heads, args.sums);
  }
  for (const kernels::AttentionOperand* operand : {&args.q, &args.k, &args.v}) {
    const Heads heads = attention_heads(spec, call, *operand, operand != &args.q);
    const bool transposed = operand == &args.v;
    for (int64_t row = 0; row < int64_t{args.batch} * operand->heads; ++row) {
      const AttentionBlock* of_mean = nullptr;
      std::vector<float> mean;
      for (int64_t at = 0; at < heads.count(); ++at) {
        if (spec.step == AttentionStep::kDequantize) {
          dequantize_block(heads, row, at, transposed);
          continue;
        }
        const AttentionBlock& block = heads.blocks[static_cast<size_t>(at)];
        if (operand == &args.k && (of_mean == nullptr || of_mean->first != block.first)) {
          mean = mean_of(heads, row, block, args.sums);
          of_mean = &block;
        }
        cast_block(heads, row, at, mean, transposed);
      }
    }
  }
}

}  // namespace f8::runtime::emulation
