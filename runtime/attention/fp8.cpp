#include "runtime/attention/fp8.hpp"

#include <algorithm>
#include <utility>

#include "codegen/kernels/attention/attention_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "runtime/attention/operands.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"

namespace f8::runtime {
namespace {

// The blocks of the launch that adds up k, each of which leaves a sum.
int64_t blocks_of_sums(const AttentionDesc& desc, const AttentionSizes& sizes) {
  if (desc.packed) return desc.heads_kv * desc.blocks(sizes.batch, sizes.tokens_kv);
  return sizes.batch * desc.heads_kv *
         kernels::attention_slabs(static_cast<int32_t>(sizes.tokens_kv));
}

// The copies of a call, in the order of `saved`, and of packed sequences where their tokens lie.
struct Saved {
  int64_t blocks_q, blocks_k;                       // of all heads
  int64_t packed_q = 0, packed_k = 0;               // blocks of packed sequences
  size_t k, v, packed, scales, largest_p, offsets;  // where they begin
  size_t bytes;

  Saved(const AttentionDesc& desc, const AttentionSizes& sizes)
      : blocks_q(desc.heads_q * desc.blocks(sizes.batch, sizes.tokens_q)),
        blocks_k(desc.heads_kv * desc.blocks(sizes.batch, sizes.tokens_kv)) {
    if (desc.packed) {
      packed_q = desc.blocks(sizes.batch, sizes.tokens_q);
      packed_k = desc.blocks(sizes.batch, sizes.tokens_kv);
    }
    const auto block = static_cast<size_t>(kernels::kAttentionTile * desc.head_dim);
    k = static_cast<size_t>(blocks_q) * block;
    v = k + static_cast<size_t>(blocks_k) * block;
    packed = v + static_cast<size_t>(blocks_k) * block;
    scales = packed + static_cast<size_t>(packed_q + packed_k) * sizeof(kernels::AttentionBlock);
    largest_p = scales + static_cast<size_t>(blocks()) * sizeof(float);
    offsets = largest_p;
    if (desc.recipe == AttentionRecipe::kFp8) offsets += queries_of(desc, sizes) * sizeof(float);
    bytes = offsets;
    if (desc.packed) bytes += static_cast<size_t>(sizes.batch + 1) * 2 * sizeof(int32_t);
  }
  [[nodiscard]] int64_t blocks() const { return blocks_q + 2 * blocks_k; }
};

kernels::AttentionOperand operand(const float8_heads& heads, void* copy, float* inv_scale,
                                  int64_t tokens, int64_t count) {
  return {.x = static_cast<kernels::u16*>(heads.data),
          .stride_batch = heads.batch_stride,
          .stride_head = heads.head_stride,
          .stride_token = heads.token_stride,
          .copy = static_cast<kernels::u8*>(copy),
          .inv_scale = inv_scale,
          .tokens = static_cast<int32_t>(tokens),
          .heads = static_cast<int32_t>(count)};
}

// Kernels of a batch read the AttentionCastArgs alone.
kernels::AttentionPackedCastArgs cast_args(const AttentionDesc& desc, const AttentionSizes& sizes,
                                           void* kept, const float8_heads& q, const float8_heads& k,
                                           const float8_heads& v) {
  const Saved saved(desc, sizes);
  char* const data = static_cast<char*>(kept);
  auto* const scales = reinterpret_cast<float*>(data + saved.scales);
  auto* const blocks = reinterpret_cast<kernels::AttentionBlock*>(data + saved.packed);
  return {{.q = operand(q, data, scales, sizes.tokens_q, desc.heads_q),
           .k = operand(k, data + saved.k, scales + saved.blocks_q, sizes.tokens_kv, desc.heads_kv),
           .v = operand(v, data + saved.v, scales + saved.blocks_q + saved.blocks_k,
                        sizes.tokens_kv, desc.heads_kv),
           .sums = nullptr,
           .batch = desc.packed ? 1 : static_cast<int32_t>(sizes.batch),
           .padding = 0},
          blocks,
          blocks + saved.packed_q,
          nullptr,
          nullptr,
          reinterpret_cast<int32_t*>(data + saved.offsets),
          nullptr,
          static_cast<int32_t>(sizes.batch),
          0,
          0,
          0};
}

// Where a backward in bf16 has q, k and v in its workspace: the provider's is behind them.
struct Dequantized {
  size_t k, v, bytes;

  Dequantized(const AttentionDesc& desc, const AttentionSizes& sizes) {
    constexpr int64_t kStep = 128;  // elements: each begins as aligned as the workspace
    const auto whole = [&](OfKeys of_keys) {
      return static_cast<size_t>(ceil_div(elements_of(desc, sizes, of_keys), kStep) * kStep) *
             size_bytes(Dtype::kBf16);
    };
    k = whole(OfKeys::kNo);
    v = k + whole(OfKeys::kYes);
    bytes = v + whole(OfKeys::kYes);
  }
};

float* largest_p(void* kept, const Saved& saved) {
  return reinterpret_cast<float*>(static_cast<char*>(kept) + saved.largest_p);
}

kernels::AttentionGradient gradient(const float8_heads& heads) {
  return {static_cast<kernels::u16*>(heads.data), heads.batch_stride, heads.head_stride,
          heads.token_stride};
}

}  // namespace

Result<std::shared_ptr<const Attention>> Fp8Attention::create(
    const std::shared_ptr<Context>& context, const AttentionDesc& desc) {
  AttentionForward forward = F8_TRY(AttentionForward::create(context, desc));
  std::optional<AttentionBackward> backward;
  // A forward, and a backward of the caller's own, need no library.
  Result<AttentionProviderPtr> provider;
  if (desc.recipe == AttentionRecipe::kFp8) {
    backward = F8_TRY(AttentionBackward::create(context, desc));
  } else {
    provider = open_attention_provider(context, desc);
  }
  const auto kernel = [&](codegen::AttentionStep step) {
    return context->kernel(codegen::AttentionCastSpec{
        .head_dim = static_cast<int>(desc.head_dim), .step = step, .packed = desc.packed});
  };
  Kernels kernels;
  kernels.sum_keys = F8_TRY(kernel(codegen::AttentionStep::kSumKeys));
  kernels.cast = F8_TRY(kernel(codegen::AttentionStep::kCast));
  kernels.dequantize = F8_TRY(kernel(codegen::AttentionStep::kDequantize));
  if (desc.packed) kernels.layout = F8_TRY(kernel(codegen::AttentionStep::kLayout));
  return std::shared_ptr<const Attention>(new Fp8Attention(
      context, desc, std::move(forward), std::move(backward), std::move(provider), kernels));
}

size_t Fp8Attention::saved_bytes(const AttentionSizes& sizes) const {
  return Saved(desc_, sizes).bytes;
}

size_t Fp8Attention::workspace_bytes(const AttentionSizes& sizes) const {
  return static_cast<size_t>(blocks_of_sums(desc_, sizes) * desc_.head_dim) * sizeof(float);
}

size_t Fp8Attention::backward_workspace_bytes(const AttentionSizes& sizes) const {
  if (backward_) return backward_->workspace_bytes(sizes.batch, sizes.tokens_q, sizes.tokens_kv);
  if (!provider_) return 0;
  return Dequantized(desc_, sizes).bytes +
         dense_workspace_bytes(**provider_, AttentionPass::kBackward, desc_, sizes);
}

Status Fp8Attention::forward(const float8_attention_forward_args& args, Stream stream) const {
  return run(args, stream, kAllParts);
}

// A cast reads each element of bf16 once and writes it in fp8; the sums read k.
std::vector<Step> Fp8Attention::forward_steps(const float8_attention_forward_args& args) const {
  const auto q = static_cast<double>(elements_of(desc_, args.sizes, OfKeys::kNo));
  const auto k = static_cast<double>(elements_of(desc_, args.sizes, OfKeys::kYes));
  PartSteps steps([this, args](Stream stream, unsigned parts) { return run(args, stream, parts); });
  if (kernels_.layout != nullptr) steps.add("layout", kLayout);
  steps.add("sum k", kSumKeys, 2 * k);
  steps.add("cast q,k,v", kCast, 3 * (q + 2 * k));
  steps.add("forward", kAttend, 0, kAttentionForwardProducts);
  return steps.take();
}

// The casts read dout and o in bf16, and write dout in fp8, twice; q, k and v they read in fp8 and write once.
std::vector<Step> Fp8Attention::backward_steps(const float8_attention_backward_args& args) const {
  const auto q = static_cast<double>(elements_of(desc_, args.sizes, OfKeys::kNo));
  const auto k = static_cast<double>(elements_of(desc_, args.sizes, OfKeys::kYes));
  if (!backward_) {
    PartSteps steps(
        [this, args](Stream stream, unsigned parts) { return run_library(args, stream, parts); });
    steps.add("dequantize q,k,v", kDequantize, 3 * (q + 2 * k));
    steps.add("backward in bf16", kDifferentiate, 0, kAttentionBackwardProducts);
    return steps.take();
  }
  PartSteps steps([this, args](Stream stream, unsigned parts) { return run(args, stream, parts); });
  steps.add("cast dO", AttentionBackward::kCast, 8 * q + 4 * k);
  steps.add("dQ", AttentionBackward::kQueries, 0, 3);  // Q K^T, dO V^T and dS K
  if (backward_->has_both()) {
    steps.add("dK,dV", AttentionBackward::kKeys, 0, 4);  // the first two again, dS^T Q and P^T dO
  } else {
    steps.add("dK", AttentionBackward::kKeys, 0, 3);
    steps.add("dV", AttentionBackward::kValues, 0, 2);  // Q K^T again, and P^T dO
  }
  return steps.take();
}

Status Fp8Attention::run(const float8_attention_forward_args& args, Stream stream,
                         unsigned parts) const {
  F8_TRY(check(args.sizes));
  if (is_nothing(args.sizes)) return {};
  CallMemory memory(kAttentionForwardArgs);
  F8_TRY(add_operands(kAttentionForwardArgs, args, desc_, Access::kRead, memory));
  const Saved saved(desc_, args.sizes);
  F8_TRY(add_saved(kAttentionForwardArgs, args, saved.bytes, Access::kWrite, memory));
  F8_TRY(add_results(kAttentionForwardArgs, args, desc_, Access::kWrite,
                     workspace_bytes(args.sizes), memory));
  F8_TRY(add_offsets(args, desc_, memory));
  F8_TRY(memory.check(kAttentionForward, *context_, stream));
  kernels::AttentionPackedCastArgs casts =
      cast_args(desc_, args.sizes, args.saved.data, args.q, args.k, args.v);
  casts.sums = static_cast<float*>(args.workspace.data);
  set_offsets(args, casts);
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const bool overlap = state.options.programmatic_launch;
  if (kernels_.layout != nullptr && (parts & kLayout) != 0) {
    F8_TRY(launch_with(casts, state.driver, *kernels_.layout, 1, overlap, stream));
  }
  if ((parts & kSumKeys) != 0) {
    F8_TRY(launch_with(casts, state.driver, *kernels_.sum_keys, blocks_of_sums(desc_, args.sizes),
                       overlap, stream));
  }
  if ((parts & kCast) != 0) {
    F8_TRY(launch_with(casts, state.driver, *kernels_.cast, saved.blocks(), overlap, stream));
  }
  if ((parts & kAttend) == 0) return {};
  return forward_.run({.batch = args.sizes.batch,
                       .queries = args.sizes.tokens_q,
                       .keys = args.sizes.tokens_kv,
                       .q = casts.q.copy,
                       .k = casts.k.copy,
                       .v_t = casts.v.copy,
                       .inv_scale_q = casts.q.inv_scale,
                       .inv_scale_k = casts.k.inv_scale,
                       .inv_scale_v = casts.v.inv_scale,
                       .packed = {casts.blocks_q, casts.blocks_k, casts.sequences},
                       .o = args.o,
                       .lse = args.lse,
                       .largest_p = backward_ ? largest_p(args.saved.data, saved) : nullptr},
                      stream);
}

Status Fp8Attention::dequantize(const float8_attention_dequantize_args& args, Stream stream) const {
  F8_TRY(check(args.sizes));
  if (is_nothing(args.sizes)) return {};
  CallMemory memory(kAttentionDequantizeArgs);
  F8_TRY(add_operands(kAttentionDequantizeArgs, args, desc_, Access::kWrite, memory));
  F8_TRY(add_saved(kAttentionDequantizeArgs, args, saved_bytes(args.sizes), Access::kRead, memory));
  F8_TRY(memory.check(kAttentionDequantize, *context_, stream));
  return launch_dequantize(args.sizes, args.saved.data, args.q, args.k, args.v, stream);
}

Status Fp8Attention::launch_dequantize(const AttentionSizes& sizes, void* saved,
                                       const float8_heads& q, const float8_heads& k,
                                       const float8_heads& v, Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  return launch_with(cast_args(desc_, sizes, saved, q, k, v), state.driver, *kernels_.dequantize,
                     Saved(desc_, sizes).blocks(), state.options.programmatic_launch, stream);
}

Status Fp8Attention::backward(const float8_attention_backward_args& args, Stream stream) const {
  if (backward_) return run(args, stream, AttentionBackward::kAllParts);
  return run_library(args, stream, kWholeLibrary);
}

Status Fp8Attention::check_memory(const float8_attention_backward_args& args,
                                  size_t workspace_bytes, Stream stream) const {
  CallMemory memory(kAttentionBackwardArgs);
  F8_TRY(add_gradients(args, desc_, memory));
  F8_TRY(add_results(kAttentionBackwardArgs, args, desc_, Access::kRead, workspace_bytes, memory));
  F8_TRY(add_saved(kAttentionBackwardArgs, args, saved_bytes(args.sizes), Access::kRead, memory));
  return memory.check(kAttentionBackward, *context_, stream);
}

Status Fp8Attention::run_library(const float8_attention_backward_args& args, Stream stream,
                                 unsigned parts) const {
  const AttentionSizes& sizes = args.sizes;
  F8_TRY(check(sizes));
  if (!provider_) {
    return fail(
        provider_.error().code,
        "{} of recipe fp8_forward is in bf16: {}; or take float8_attention_dequantize and a "
        "backward of your own",
        kAttentionBackward, provider_.error().message);
  }
  if (is_nothing(sizes)) return {};
  const size_t bytes = backward_workspace_bytes(sizes);
  F8_TRY(check_memory(args, bytes, stream));
  const Dequantized at(desc_, sizes);
  char* const data = static_cast<char*>(args.workspace.data);
  ProviderCall call = backward_call(args, desc_);
  call.q = dense_heads(data, desc_, sizes, OfKeys::kNo);
  call.k = dense_heads(data + at.k, desc_, sizes, OfKeys::kYes);
  call.v = dense_heads(data + at.v, desc_, sizes, OfKeys::kYes);
  call.workspace = {data + at.bytes, bytes - at.bytes};
  if (desc_.packed) {
    const char* const saved = static_cast<const char*>(args.saved.data);
    call.offsets = reinterpret_cast<const int32_t*>(saved + Saved(desc_, sizes).offsets);
  }
  if ((parts & kDequantize) != 0) {
    F8_TRY(launch_dequantize(sizes, args.saved.data, call.q, call.k, call.v, stream));
  }
  if ((parts & kDifferentiate) == 0) return {};
  return (*provider_)->run(AttentionPass::kBackward, call, stream);
}

Status Fp8Attention::run(const float8_attention_backward_args& args, Stream stream,
                         unsigned parts) const {
  F8_TRY(check(args.sizes));
  if (is_nothing(args.sizes)) return {};
  const AttentionSizes& sizes = args.sizes;
  F8_TRY(check_memory(args, backward_workspace_bytes(sizes), stream));
  const Saved saved(desc_, sizes);
  const float8_heads o = dense_heads(args.o, desc_, sizes, OfKeys::kNo);
  return backward_->run(
      {.batch = sizes.batch,
       .kept = cast_args(desc_, sizes, args.saved.data, {}, {}, {}),
       .dout = operand(args.dout, nullptr, nullptr, sizes.tokens_q, desc_.heads_q),
       .o = operand(o, nullptr, nullptr, sizes.tokens_q, desc_.heads_q),
       .lse = args.lse,
       .largest_p = largest_p(args.saved.data, saved),
       .workspace = args.workspace.data,
       .dq = gradient(args.dq),
       .dk = gradient(args.dk),
       .dv = gradient(args.dv)},
      stream, parts);
}

}  // namespace f8::runtime
