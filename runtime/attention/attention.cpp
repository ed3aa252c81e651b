#include "runtime/attention/attention.hpp"

#include <algorithm>
#include <cmath>

#include "codegen/kernels/attention/attention_args.cuh"
#include "runtime/attention/bf16.hpp"
#include "runtime/attention/fp8.hpp"

namespace f8::runtime {
namespace {

constexpr int64_t kMostRows = int64_t{1}
                              << 31;  // of all heads of a batch: coordinates of a tensor map

}  // namespace

Result<std::shared_ptr<const Attention>> Attention::plan(const std::shared_ptr<Context>& context,
                                                         const AttentionDesc& desc) {
  if (std::ranges::find(codegen::kAttentionHeadDims, desc.head_dim) ==
      std::end(codegen::kAttentionHeadDims)) {
    return fail(ErrorCode::kUnsupported, "heads of {}: attention has heads of 64, 128 and 256",
                desc.head_dim);
  }
  if (desc.heads_kv < 1 || desc.heads_q < 1 || desc.heads_q % desc.heads_kv != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{} heads of queries and {} of keys: the first are a multiple of the second",
                desc.heads_q, desc.heads_kv);
  }
  if (!std::isfinite(desc.scale) || desc.scale < 0) {
    return fail(ErrorCode::kInvalidArgument, "scale is {}; it is positive, or 0 for the head's own",
                desc.scale);
  }
  if (desc.window < 0 || (desc.window > 0 && !desc.causal)) {
    return fail(ErrorCode::kInvalidArgument,
                "window is {} with causal {}; it is the number of keys that a query has under a "
                "causal mask, or 0 for all",
                desc.window, desc.causal ? 1 : 0);
  }
  AttentionDesc own = desc;
  if (own.scale == 0) own.scale = 1.0F / std::sqrt(static_cast<float>(own.head_dim));
  if (own.recipe == AttentionRecipe::kBf16) return Bf16Attention::create(context, own);
  return Fp8Attention::create(context, own);
}

Status Attention::check(const AttentionSizes& sizes) const {
  if (sizes.batch < 0 || sizes.tokens_q < 0 || sizes.tokens_kv < 1) {
    return fail(
        ErrorCode::kInvalidArgument,
        "attention of a batch of {}, {} queries and {} keys: none is negative, and there is "
        "a key",
        sizes.batch, sizes.tokens_q, sizes.tokens_kv);
  }
  if (sizes.longest_q < 0 || sizes.longest_kv < 0) {
    return fail(ErrorCode::kInvalidArgument,
                "longest_q is {}, longest_kv {}; they are tokens of a sequence, or 0 for any",
                sizes.longest_q, sizes.longest_kv);
  }
  if (desc_.packed && sizes.batch == 0 && sizes.tokens_q > 0) {
    return fail(ErrorCode::kInvalidArgument,
                "packed attention of {} queries in no sequence: batch is the number of sequences",
                sizes.tokens_q);
  }
  if (!desc_.packed && desc_.window > 0 && sizes.tokens_q - sizes.tokens_kv >= desc_.window) {
    return fail(ErrorCode::kInvalidArgument,
                "attention of {} queries and {} keys in a window of {}: the last query has no key",
                sizes.tokens_q, sizes.tokens_kv, desc_.window);
  }
  for (const auto& [tokens, heads] :
       {std::pair{sizes.tokens_q, desc_.heads_q}, std::pair{sizes.tokens_kv, desc_.heads_kv}}) {
    if (tokens >= kMostRows || sizes.batch >= kMostRows ||
        desc_.blocks(std::max<int64_t>(sizes.batch, 1), tokens) >=
            kMostRows / kernels::kAttentionTile / heads) {
      return fail(
          ErrorCode::kInvalidArgument,
          "attention of a batch of {}, {} tokens and {} heads: all heads together have less "
          "than 2^31 tokens",
          sizes.batch, tokens, heads);
    }
  }
  return {};
}

}  // namespace f8::runtime
