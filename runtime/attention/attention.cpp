#include "runtime/attention/attention.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "codegen/kernels/attention/attention_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "runtime/device/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kForward = "float8_attention_forward";
constexpr const char* kForwardArgs = "float8_attention_forward_args";
constexpr const char* kDequantize = "float8_attention_dequantize";
constexpr const char* kDequantizeArgs = "float8_attention_dequantize_args";
constexpr int64_t kMostRows = int64_t{1}
                              << 31;  // of all heads of a batch: coordinates of a tensor map
constexpr int64_t kStrideStep = 8;    // of bf16: 16 bytes

// The blocks of the launch that adds up k.
int64_t blocks_of_sums(const AttentionDesc& desc, const AttentionSizes& sizes) {
  return sizes.batch * desc.heads_kv *
         kernels::attention_slabs(static_cast<int32_t>(sizes.tokens_kv));
}

int64_t blocks_of(int64_t tokens) {
  return ceil_div(tokens, kernels::kAttentionTile);
}

// The copies of a call, in the order of `saved`.
struct Saved {
  int64_t blocks_q, blocks_k;  // of all heads
  size_t k, v, scales;         // where they begin
  size_t bytes;

  Saved(const AttentionDesc& desc, const AttentionSizes& sizes)
      : blocks_q(sizes.batch * desc.heads_q * blocks_of(sizes.tokens_q)),
        blocks_k(sizes.batch * desc.heads_kv * blocks_of(sizes.tokens_kv)) {
    const auto block = static_cast<size_t>(kernels::kAttentionTile * desc.head_dim);
    k = static_cast<size_t>(blocks_q) * block;
    v = k + static_cast<size_t>(blocks_k) * block;
    scales = v + static_cast<size_t>(blocks_k) * block;
    bytes = scales + static_cast<size_t>(blocks_q + 2 * blocks_k) * sizeof(float);
  }
  [[nodiscard]] int64_t blocks() const { return blocks_q + 2 * blocks_k; }
};

kernels::AttentionOperand operand(const float8_heads& heads, void* saved, size_t copy,
                                  float* inv_scale, int64_t tokens, int64_t count) {
  return {.x = static_cast<kernels::u16*>(heads.data),
          .stride_batch = heads.batch_stride,
          .stride_head = heads.head_stride,
          .stride_token = heads.token_stride,
          .copy = static_cast<kernels::u8*>(saved) + copy,
          .inv_scale = inv_scale,
          .tokens = static_cast<int32_t>(tokens),
          .heads = static_cast<int32_t>(count)};
}

template <class Args>
kernels::AttentionCastArgs cast_args(const AttentionDesc& desc, const Args& args, void* sums) {
  const AttentionSizes& sizes = args.sizes;
  const Saved saved(desc, sizes);
  auto* const scales = reinterpret_cast<float*>(static_cast<char*>(args.saved.data) + saved.scales);
  return {.q = operand(args.q, args.saved.data, 0, scales, sizes.tokens_q, desc.heads_q),
          .k = operand(args.k, args.saved.data, saved.k, scales + saved.blocks_q, sizes.tokens_kv,
                       desc.heads_kv),
          .v = operand(args.v, args.saved.data, saved.v, scales + saved.blocks_q + saved.blocks_k,
                       sizes.tokens_kv, desc.heads_kv),
          .sums = static_cast<float*>(sums),
          .batch = static_cast<int32_t>(sizes.batch),
          .padding = 0};
}

Status add_heads(const char* args, const char* name, const float8_heads& heads,
                 const AttentionDesc& desc, int64_t batch, int64_t count, int64_t tokens,
                 Access access, CallMemory& memory) {
  F8_TRY(need(args, name, heads.data));
  const std::pair<const char*, int64_t> strides[] = {{"batch_stride", heads.batch_stride},
                                                     {"head_stride", heads.head_stride},
                                                     {"token_stride", heads.token_stride}};
  for (const auto& [field, stride] : strides) {
    if (stride < 0 || stride % kStrideStep != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{}.{} is {}; strides are multiples of {} elements, not negative", args, name,
                  field, stride, kStrideStep);
    }
  }
  const int64_t last = (batch - 1) * heads.batch_stride + (count - 1) * heads.head_stride +
                       (tokens - 1) * heads.token_stride + desc.head_dim;
  memory.add(name, heads.data, static_cast<size_t>(last) * size_bytes(Dtype::kBf16), access);
  return {};
}

// q, k and v of a call, and its copies.
template <class Args>
Status add_operands(const char* type, const Args& args, const AttentionDesc& desc, Access access,
                    CallMemory& memory) {
  const AttentionSizes& sizes = args.sizes;
  F8_TRY(add_heads(type, "q", args.q, desc, sizes.batch, desc.heads_q, sizes.tokens_q, access,
                   memory));
  F8_TRY(add_heads(type, "k", args.k, desc, sizes.batch, desc.heads_kv, sizes.tokens_kv, access,
                   memory));
  F8_TRY(add_heads(type, "v", args.v, desc, sizes.batch, desc.heads_kv, sizes.tokens_kv, access,
                   memory));
  F8_TRY(need(type, "saved.data", args.saved.data));
  memory.add("saved", args.saved.data, Saved(desc, sizes).bytes,
             access == Access::kRead ? Access::kWrite : Access::kRead);
  return {};
}

bool is_nothing(const AttentionSizes& sizes) {
  return sizes.batch == 0 || sizes.tokens_q == 0;
}

}  // namespace

Result<std::shared_ptr<const Attention>> Attention::plan(const std::shared_ptr<Context>& context,
                                                         const AttentionDesc& desc) {
  if (desc.head_dim != 128) {
    return fail(ErrorCode::kUnsupported, "heads of {}: attention in fp8 has heads of 128",
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
  AttentionForward forward = F8_TRY(AttentionForward::create(context, own));
  const auto kernel = [&](codegen::AttentionStep step) {
    return context->kernel(
        codegen::AttentionCastSpec{.head_dim = static_cast<int>(own.head_dim), .step = step});
  };
  const Kernel* sum_keys = F8_TRY(kernel(codegen::AttentionStep::kSumKeys));
  const Kernel* cast = F8_TRY(kernel(codegen::AttentionStep::kCast));
  const Kernel* dequantize = F8_TRY(kernel(codegen::AttentionStep::kDequantize));
  return std::shared_ptr<const Attention>(
      new Attention(context, own, std::move(forward), *sum_keys, *cast, *dequantize));
}

Status Attention::check(const AttentionSizes& sizes) const {
  if (sizes.batch < 0 || sizes.tokens_q < 0 || sizes.tokens_kv < 1) {
    return fail(
        ErrorCode::kInvalidArgument,
        "attention of a batch of {}, {} queries and {} keys: none is negative, and there is "
        "a key",
        sizes.batch, sizes.tokens_q, sizes.tokens_kv);
  }
  if (desc_.window > 0 && sizes.tokens_q - sizes.tokens_kv >= desc_.window) {
    return fail(ErrorCode::kInvalidArgument,
                "attention of {} queries and {} keys in a window of {}: the last query has no key",
                sizes.tokens_q, sizes.tokens_kv, desc_.window);
  }
  for (const auto& [tokens, heads] :
       {std::pair{sizes.tokens_q, desc_.heads_q}, std::pair{sizes.tokens_kv, desc_.heads_kv}}) {
    if (tokens >= kMostRows || sizes.batch >= kMostRows ||
        blocks_of(tokens) * kernels::kAttentionTile >=
            kMostRows / heads / std::max<int64_t>(sizes.batch, 1)) {
      return fail(
          ErrorCode::kInvalidArgument,
          "attention of a batch of {}, {} tokens and {} heads: all heads together have less "
          "than 2^31 tokens",
          sizes.batch, tokens, heads);
    }
  }
  return {};
}

size_t Attention::saved_bytes(const AttentionSizes& sizes) const {
  return Saved(desc_, sizes).bytes;
}

size_t Attention::workspace_bytes(const AttentionSizes& sizes) const {
  return static_cast<size_t>(blocks_of_sums(desc_, sizes) * desc_.head_dim) * sizeof(float);
}

Status Attention::forward(const float8_attention_forward_args& args, Stream stream) const {
  F8_TRY(check(args.sizes));
  if (is_nothing(args.sizes)) return {};
  CallMemory memory(kForwardArgs);
  F8_TRY(add_operands(kForwardArgs, args, desc_, Access::kRead, memory));
  F8_TRY(need(kForwardArgs, "o", args.o));
  F8_TRY(need(kForwardArgs, "lse", args.lse));
  F8_TRY(need(kForwardArgs, "workspace.data", args.workspace.data));
  const auto rows = static_cast<size_t>(args.sizes.batch * desc_.heads_q * args.sizes.tokens_q);
  memory.add("o", args.o, rows * static_cast<size_t>(desc_.head_dim) * size_bytes(Dtype::kBf16),
             Access::kWrite);
  memory.add("lse", args.lse, rows * sizeof(float), Access::kWrite, sizeof(float));
  memory.add("workspace", args.workspace.data, workspace_bytes(args.sizes), Access::kWrite);
  F8_TRY(memory.check(kForward, *context_, stream));
  const kernels::AttentionCastArgs casts = cast_args(desc_, args, args.workspace.data);
  const Saved saved(desc_, args.sizes);
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const bool overlap = state.options.programmatic_launch;
  F8_TRY(launch_with(casts, state.driver, *sum_keys_, blocks_of_sums(desc_, args.sizes), overlap,
                     stream));
  F8_TRY(launch_with(casts, state.driver, *cast_, saved.blocks(), overlap, stream));
  return forward_.run({.batch = args.sizes.batch,
                       .queries = args.sizes.tokens_q,
                       .keys = args.sizes.tokens_kv,
                       .q = casts.q.copy,
                       .k = casts.k.copy,
                       .v_t = casts.v.copy,
                       .inv_scale_q = casts.q.inv_scale,
                       .inv_scale_k = casts.k.inv_scale,
                       .inv_scale_v = casts.v.inv_scale,
                       .o = args.o,
                       .lse = args.lse},
                      stream);
}

Status Attention::dequantize(const float8_attention_dequantize_args& args, Stream stream) const {
  F8_TRY(check(args.sizes));
  if (is_nothing(args.sizes)) return {};
  CallMemory memory(kDequantizeArgs);
  F8_TRY(add_operands(kDequantizeArgs, args, desc_, Access::kWrite, memory));
  F8_TRY(memory.check(kDequantize, *context_, stream));
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  return launch_with(cast_args(desc_, args, nullptr), state.driver, *dequantize_,
                     Saved(desc_, args.sizes).blocks(), state.options.programmatic_launch, stream);
}

}  // namespace f8::runtime
