#include "runtime/attention/attention.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "codegen/kernels/attention/attention_args.cuh"
#include "recipes/attention.hpp"
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
constexpr const char* kBackward = "float8_attention_backward";
constexpr const char* kBackwardArgs = "float8_attention_backward_args";
constexpr int64_t kMostRows = int64_t{1}
                              << 31;  // of all heads of a batch: coordinates of a tensor map
constexpr int64_t kStrideStep = 8;    // of bf16: 16 bytes
constexpr int64_t kMostElements =
    int64_t{1} << 48;  // from a tensor's first one to its last: no memory has them

// The blocks of the launch that adds up k, each of which leaves a sum.
int64_t blocks_of_sums(const AttentionDesc& desc, const AttentionSizes& sizes) {
  if (desc.packed) return desc.heads_kv * desc.blocks(sizes.batch, sizes.tokens_kv);
  return sizes.batch * desc.heads_kv *
         kernels::attention_slabs(static_cast<int32_t>(sizes.tokens_kv));
}

// Queries of all heads.
size_t queries_of(const AttentionDesc& desc, const AttentionSizes& sizes) {
  return static_cast<size_t>((desc.packed ? 1 : sizes.batch) * desc.heads_q * sizes.tokens_q);
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
    if (desc.fp8_backward) offsets += queries_of(desc, sizes) * sizeof(float);
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

Status add_heads(const char* args, const char* name, const float8_heads& heads,
                 const AttentionDesc& desc, int64_t sequences, int64_t count, int64_t tokens,
                 Access access, CallMemory& memory) {
  F8_TRY(need(args, name, heads.data));
  struct Axis {
    const char* field;
    int64_t stride, last;  // the last coordinate
  };
  std::array axes = {Axis{"head_stride", heads.head_stride, count - 1},
                     Axis{"token_stride", heads.token_stride, tokens - 1},
                     Axis{"batch_stride", heads.batch_stride, desc.packed ? 0 : sequences - 1}};
  for (const auto& [field, stride, last] : axes) {
    if (stride < 0 || stride % kStrideStep != 0 || (last > 0 && stride > kMostElements / last)) {
      return fail(
          ErrorCode::kInvalidArgument,
          "{}.{}.{} is {}; strides are multiples of {} elements, not negative, and all of a "
          "tensor lies within 2^48 elements",
          args, name, field, stride, kStrideStep);
    }
  }
  std::ranges::sort(axes, {}, &Axis::stride);
  int64_t last = desc.head_dim;  // one behind the last element of the axes so far
  for (const Axis& axis : axes) {
    if (axis.last == 0) continue;
    if (access == Access::kWrite && axis.stride < last) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{}.{} is {}; the tensor is written and its elements do not overlap: it is at "
                  "least {}",
                  args, name, axis.field, axis.stride, last);
    }
    last += axis.last * axis.stride;
  }
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

// The offsets of packed sequences, which others do not have, and where an error of theirs is kept.
Status add_offsets(const float8_attention_forward_args& args, const AttentionDesc& desc,
                   CallMemory& memory) {
  const std::pair<const char*, const int32_t*> offsets[] = {{"cu_seqlens_q", args.cu_seqlens_q},
                                                            {"cu_seqlens_kv", args.cu_seqlens_kv}};
  for (const auto& [name, given] : offsets) {
    if (desc.packed) F8_TRY(need(kForwardArgs, name, given));
    if (!desc.packed && given != nullptr) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{} is given to attention that is not packed; plan it with "
                  "float8_attention_desc.packed",
                  kForwardArgs, name);
    }
    memory.add(name, given, static_cast<size_t>(args.sizes.batch + 1) * sizeof(int32_t),
               Access::kRead, sizeof(int32_t));
  }
  if (args.longest_q < 0 || args.longest_kv < 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.longest_q is {}, longest_kv {}; they are tokens of a sequence, or 0 for any",
                kForwardArgs, args.longest_q, args.longest_kv);
  }
  memory.add("sequence_error", args.sequence_error, 2 * sizeof(int32_t), Access::kWrite,
             sizeof(int32_t));
  return {};
}

float* largest_p(void* kept, const Saved& saved) {
  return reinterpret_cast<float*>(static_cast<char*>(kept) + saved.largest_p);
}

kernels::AttentionGradient gradient(const float8_heads& heads) {
  return {static_cast<kernels::u16*>(heads.data), heads.batch_stride, heads.head_stride,
          heads.token_stride};
}

// Elements of q, and of k or v.
std::pair<double, double> elements_of(const AttentionDesc& desc, const AttentionSizes& sizes) {
  const auto of_head = static_cast<double>((desc.packed ? 1 : sizes.batch) * desc.head_dim);
  return {of_head * static_cast<double>(desc.heads_q * sizes.tokens_q),
          of_head * static_cast<double>(desc.heads_kv * sizes.tokens_kv)};
}

bool is_nothing(const AttentionSizes& sizes) {
  return sizes.batch == 0 || sizes.tokens_q == 0;
}

}  // namespace

Result<std::shared_ptr<const Attention>> Attention::plan(const std::shared_ptr<Context>& context,
                                                         const AttentionDesc& desc) {
  if (std::ranges::find(codegen::kAttentionHeadDims, desc.head_dim) ==
      std::end(codegen::kAttentionHeadDims)) {
    return fail(ErrorCode::kUnsupported,
                "heads of {}: attention in fp8 has heads of 64, 128 and 256", desc.head_dim);
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
  std::optional<AttentionBackward> backward;
  if (own.fp8_backward) backward = F8_TRY(AttentionBackward::create(context, own));
  const auto kernel = [&](codegen::AttentionStep step) {
    return context->kernel(codegen::AttentionCastSpec{
        .head_dim = static_cast<int>(own.head_dim), .step = step, .packed = own.packed});
  };
  const Kernel* sum_keys = F8_TRY(kernel(codegen::AttentionStep::kSumKeys));
  const Kernel* cast = F8_TRY(kernel(codegen::AttentionStep::kCast));
  const Kernel* dequantize = F8_TRY(kernel(codegen::AttentionStep::kDequantize));
  const Kernel* layout = nullptr;
  if (own.packed) layout = F8_TRY(kernel(codegen::AttentionStep::kLayout));
  return std::shared_ptr<const Attention>(new Attention(context, own, std::move(forward),
                                                        std::move(backward), *sum_keys, *cast,
                                                        *dequantize, layout));
}

Status Attention::check(const AttentionSizes& sizes) const {
  if (sizes.batch < 0 || sizes.tokens_q < 0 || sizes.tokens_kv < 1) {
    return fail(
        ErrorCode::kInvalidArgument,
        "attention of a batch of {}, {} queries and {} keys: none is negative, and there is "
        "a key",
        sizes.batch, sizes.tokens_q, sizes.tokens_kv);
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

size_t Attention::saved_bytes(const AttentionSizes& sizes) const {
  return Saved(desc_, sizes).bytes;
}

size_t Attention::workspace_bytes(const AttentionSizes& sizes) const {
  return static_cast<size_t>(blocks_of_sums(desc_, sizes) * desc_.head_dim) * sizeof(float);
}

size_t Attention::backward_workspace_bytes(const AttentionSizes& sizes) const {
  if (!backward_) return 0;
  return backward_->workspace_bytes(sizes.batch, sizes.tokens_q, sizes.tokens_kv);
}

Status Attention::forward(const float8_attention_forward_args& args, Stream stream) const {
  return run(args, stream, kAllParts);
}

// A cast reads each element of bf16 once and writes it in fp8; the sums read k.
std::vector<Step> Attention::forward_steps(const float8_attention_forward_args& args) const {
  const auto [q, k] = elements_of(desc_, args.sizes);
  PartSteps steps([this, args](Stream stream, unsigned parts) { return run(args, stream, parts); });
  if (layout_ != nullptr) steps.add("layout", kLayout);
  steps.add("sum k", kSumKeys, 2 * k);
  steps.add("cast q,k,v", kCast, 3 * (q + 2 * k));
  steps.add("forward", kAttend, 0, kAttentionForwardProducts);
  return steps.take();
}

std::vector<Step> Attention::backward_steps(const float8_attention_dequantize_args& args) const {
  const auto [q, k] = elements_of(desc_, args.sizes);
  return {{"dequantize q,k,v", [this, args](Stream stream) { return dequantize(args, stream); },
           3 * (q + 2 * k)}};
}

// The casts read dout and o in bf16, and write dout in fp8, twice; q, k and v they read in fp8 and write once.
std::vector<Step> Attention::backward_steps(const float8_attention_backward_args& args) const {
  const auto [q, k] = elements_of(desc_, args.sizes);
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

Status Attention::run(const float8_attention_forward_args& args, Stream stream,
                      unsigned parts) const {
  F8_TRY(check(args.sizes));
  if (is_nothing(args.sizes)) return {};
  CallMemory memory(kForwardArgs);
  F8_TRY(add_operands(kForwardArgs, args, desc_, Access::kRead, memory));
  F8_TRY(need(kForwardArgs, "o", args.o));
  F8_TRY(need(kForwardArgs, "lse", args.lse));
  F8_TRY(need(kForwardArgs, "workspace.data", args.workspace.data));
  const size_t rows = queries_of(desc_, args.sizes);
  memory.add("o", args.o, rows * static_cast<size_t>(desc_.head_dim) * size_bytes(Dtype::kBf16),
             Access::kWrite);
  memory.add("lse", args.lse, rows * sizeof(float), Access::kWrite, sizeof(float));
  memory.add("workspace", args.workspace.data, workspace_bytes(args.sizes), Access::kWrite);
  F8_TRY(add_offsets(args, desc_, memory));
  F8_TRY(memory.check(kForward, *context_, stream));
  kernels::AttentionPackedCastArgs casts =
      cast_args(desc_, args.sizes, args.saved.data, args.q, args.k, args.v);
  casts.sums = static_cast<float*>(args.workspace.data);
  casts.offsets_q = args.cu_seqlens_q;
  casts.offsets_k = args.cu_seqlens_kv;
  casts.longest_q = static_cast<int32_t>(std::min(args.longest_q, args.sizes.tokens_q));
  casts.longest_k = static_cast<int32_t>(std::min(args.longest_kv, args.sizes.tokens_kv));
  casts.error = reinterpret_cast<int32_t*>(args.sequence_error);
  const Saved saved(desc_, args.sizes);
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const bool overlap = state.options.programmatic_launch;
  if (layout_ != nullptr && (parts & kLayout) != 0) {
    F8_TRY(launch_with(casts, state.driver, *layout_, 1, overlap, stream));
  }
  if ((parts & kSumKeys) != 0) {
    F8_TRY(launch_with(casts, state.driver, *sum_keys_, blocks_of_sums(desc_, args.sizes), overlap,
                       stream));
  }
  if ((parts & kCast) != 0) {
    F8_TRY(launch_with(casts, state.driver, *cast_, saved.blocks(), overlap, stream));
  }
  if ((parts & kAttend) == 0) return {};
  return forward_.run(
      {.batch = args.sizes.batch,
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
       .largest_p = desc_.fp8_backward ? largest_p(args.saved.data, saved) : nullptr},
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
  return launch_with(cast_args(desc_, args.sizes, args.saved.data, args.q, args.k, args.v),
                     state.driver, *dequantize_, Saved(desc_, args.sizes).blocks(),
                     state.options.programmatic_launch, stream);
}

Status Attention::backward(const float8_attention_backward_args& args, Stream stream) const {
  return run(args, stream, AttentionBackward::kAllParts);
}

Status Attention::run(const float8_attention_backward_args& args, Stream stream,
                      unsigned parts) const {
  F8_TRY(check(args.sizes));
  if (!backward_) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: the attention is planned without float8_attention_desc.fp8_backward; plan it "
                "with that, or take float8_attention_dequantize and a backward in bf16",
                kBackward);
  }
  if (is_nothing(args.sizes)) return {};
  const AttentionSizes& sizes = args.sizes;
  CallMemory memory(kBackwardArgs);
  const auto add = [&](const char* name, const float8_heads& heads, bool of_keys, Access access) {
    return add_heads(kBackwardArgs, name, heads, desc_, sizes.batch,
                     of_keys ? desc_.heads_kv : desc_.heads_q,
                     of_keys ? sizes.tokens_kv : sizes.tokens_q, access, memory);
  };
  F8_TRY(add("dout", args.dout, false, Access::kRead));
  F8_TRY(add("dq", args.dq, false, Access::kWrite));
  F8_TRY(add("dk", args.dk, true, Access::kWrite));
  F8_TRY(add("dv", args.dv, true, Access::kWrite));
  F8_TRY(need(kBackwardArgs, "o", args.o));
  F8_TRY(need(kBackwardArgs, "lse", args.lse));
  F8_TRY(need(kBackwardArgs, "saved.data", args.saved.data));
  F8_TRY(need(kBackwardArgs, "workspace.data", args.workspace.data));
  const Saved saved(desc_, sizes);
  const size_t rows = queries_of(desc_, sizes);
  memory.add("o", args.o, rows * static_cast<size_t>(desc_.head_dim) * size_bytes(Dtype::kBf16),
             Access::kRead);
  memory.add("lse", args.lse, rows * sizeof(float), Access::kRead, sizeof(float));
  memory.add("saved", args.saved.data, saved.bytes, Access::kRead);
  memory.add("workspace", args.workspace.data, backward_workspace_bytes(sizes), Access::kWrite);
  F8_TRY(memory.check(kBackward, *context_, stream));
  const int64_t of_token = desc_.heads_q * desc_.head_dim;
  const float8_heads o{const_cast<void*>(args.o), sizes.tokens_q * of_token, desc_.head_dim,
                       of_token};
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
