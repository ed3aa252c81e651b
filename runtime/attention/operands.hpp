// The tensors of a call of attention: what they refuse, and their sizes.
#pragma once

#include "codegen/kernels/attention/attention_args.cuh"
#include "runtime/attention/attention.hpp"
#include "runtime/device/calls/call_memory.hpp"

namespace f8::runtime {

inline constexpr const char* kAttentionForward = "float8_attention_forward";
inline constexpr const char* kAttentionForwardArgs = "float8_attention_forward_args";
inline constexpr const char* kAttentionDequantize = "float8_attention_dequantize";
inline constexpr const char* kAttentionDequantizeArgs = "float8_attention_dequantize_args";
inline constexpr const char* kAttentionBackward = "float8_attention_backward";
inline constexpr const char* kAttentionBackwardArgs = "float8_attention_backward_args";

[[nodiscard]] inline bool is_nothing(const AttentionSizes& sizes) {
  return sizes.batch == 0 || sizes.tokens_q == 0;
}

// Queries of all heads.
[[nodiscard]] inline size_t queries_of(const AttentionDesc& desc, const AttentionSizes& sizes) {
  return static_cast<size_t>((desc.packed ? 1 : sizes.batch) * desc.heads_q * sizes.tokens_q);
}

// Of q and its gradient, or of k, v and theirs.
enum class OfKeys : bool { kNo, kYes };

struct HeadSizes {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t tokens = 0;
  int64_t head_dim = 0;
  Dtype type = Dtype::kBf16;
};

// Checks a tensor of heads and adds it to the memory of the call.
[[nodiscard]] Status add_heads(const char* args, const char* name, const float8_heads& heads,
                               const HeadSizes& sizes, Access access, CallMemory& memory);
[[nodiscard]] Status add_heads(const char* args, const char* name, const float8_heads& heads,
                               const AttentionDesc& desc, const AttentionSizes& sizes,
                               OfKeys of_keys, Access access, CallMemory& memory);
// q, k and v of a call.
template <class Args>
[[nodiscard]] Status add_operands(const char* type, const Args& args, const AttentionDesc& desc,
                                  Access access, CallMemory& memory) {
  F8_TRY(add_heads(type, "q", args.q, desc, args.sizes, OfKeys::kNo, access, memory));
  F8_TRY(add_heads(type, "k", args.k, desc, args.sizes, OfKeys::kYes, access, memory));
  return add_heads(type, "v", args.v, desc, args.sizes, OfKeys::kYes, access, memory);
}
// o and lse of a call, and its workspace, where it has one.
template <class Args>
[[nodiscard]] Status add_results(const char* type, const Args& args, const AttentionDesc& desc,
                                 Access access, size_t workspace_bytes, CallMemory& memory) {
  F8_TRY(need(type, "o", args.o));
  F8_TRY(need(type, "lse", args.lse));
  if (workspace_bytes > 0) F8_TRY(need(type, "workspace.data", args.workspace.data));
  const size_t rows = queries_of(desc, args.sizes);
  memory.add("o", args.o, rows * static_cast<size_t>(desc.head_dim) * size_bytes(Dtype::kBf16),
             access);
  memory.add("lse", args.lse, rows * sizeof(float), access, sizeof(float));
  memory.add("workspace", args.workspace.data, workspace_bytes, Access::kWrite);
  return {};
}
// `saved`, where a call has it.
template <class Args>
[[nodiscard]] Status add_saved(const char* type, const Args& args, size_t bytes, Access access,
                               CallMemory& memory) {
  if (bytes > 0) F8_TRY(need(type, "saved.data", args.saved.data));
  memory.add("saved", args.saved.data, bytes, access);
  return {};
}
// dout, dq, dk and dv of a call.
[[nodiscard]] Status add_gradients(const float8_attention_backward_args& args,
                                   const AttentionDesc& desc, CallMemory& memory);

// The offsets of packed sequences, which others do not have, and where an error of theirs is kept.
[[nodiscard]] Status add_offsets(const float8_attention_forward_args& args,
                                 const AttentionDesc& desc, CallMemory& memory);

// Gives the layout of packed sequences what a call says of them.
void set_offsets(const float8_attention_forward_args& args, kernels::AttentionPackedCastArgs& to);

// A dense [batch][tokens][heads][head_dim].
[[nodiscard]] float8_heads dense_heads(const void* data, const AttentionDesc& desc,
                                       const AttentionSizes& sizes, OfKeys of_keys);
// Elements of q, or of k or v.
[[nodiscard]] inline int64_t elements_of(const AttentionDesc& desc, const AttentionSizes& sizes,
                                         OfKeys of_keys) {
  return dense_heads(nullptr, desc, sizes, of_keys).batch_stride * (desc.packed ? 1 : sizes.batch);
}

}  // namespace f8::runtime
