#include "runtime/attention/operands.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace f8::runtime {
namespace {

constexpr int64_t kStrideStep = 8;  // 16 bytes of bf16, and more of wider types
constexpr int64_t kMostElements =
    int64_t{1} << 48;  // from a tensor's first one to its last: no memory has them

}  // namespace

Status add_heads(const char* args, const char* name, const float8_heads& heads,
                 const HeadSizes& sizes, Access access, CallMemory& memory) {
  F8_TRY(need(args, name, heads.data));
  struct Axis {
    const char* field;
    int64_t stride, last;  // the last coordinate
  };
  std::array axes = {Axis{"head_stride", heads.head_stride, sizes.heads - 1},
                     Axis{"token_stride", heads.token_stride, sizes.tokens - 1},
                     Axis{"batch_stride", heads.batch_stride, sizes.batch - 1}};
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
  int64_t last = sizes.head_dim;  // one behind the last element of the axes so far
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
  memory.add(name, heads.data, static_cast<size_t>(last) * size_bytes(sizes.type), access);
  return {};
}

Status add_heads(const char* args, const char* name, const float8_heads& heads,
                 const AttentionDesc& desc, const AttentionSizes& sizes, OfKeys of_keys,
                 Access access, CallMemory& memory) {
  const bool keys = of_keys == OfKeys::kYes;
  return add_heads(args, name, heads,
                   HeadSizes{.batch = desc.packed ? 1 : sizes.batch,
                             .heads = keys ? desc.heads_kv : desc.heads_q,
                             .tokens = keys ? sizes.tokens_kv : sizes.tokens_q,
                             .head_dim = desc.head_dim},
                   access, memory);
}

Status add_gradients(const float8_attention_backward_args& args, const AttentionDesc& desc,
                     CallMemory& memory) {
  const auto add = [&](const char* name, const float8_heads& heads, OfKeys of_keys, Access access) {
    return add_heads(kAttentionBackwardArgs, name, heads, desc, args.sizes, of_keys, access,
                     memory);
  };
  F8_TRY(add("dout", args.dout, OfKeys::kNo, Access::kRead));
  F8_TRY(add("dq", args.dq, OfKeys::kNo, Access::kWrite));
  F8_TRY(add("dk", args.dk, OfKeys::kYes, Access::kWrite));
  return add("dv", args.dv, OfKeys::kYes, Access::kWrite);
}

Status add_offsets(const float8_attention_forward_args& args, const AttentionDesc& desc,
                   CallMemory& memory) {
  const std::pair<const char*, const int32_t*> offsets[] = {{"cu_seqlens_q", args.cu_seqlens_q},
                                                            {"cu_seqlens_kv", args.cu_seqlens_kv}};
  for (const auto& [name, given] : offsets) {
    if (desc.packed) F8_TRY(need(kAttentionForwardArgs, name, given));
    if (!desc.packed && given != nullptr) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{} is given to attention that is not packed; plan it with "
                  "float8_attention_desc.packed",
                  kAttentionForwardArgs, name);
    }
    memory.add(name, given, static_cast<size_t>(args.sizes.batch + 1) * sizeof(int32_t),
               Access::kRead, sizeof(int32_t));
  }
  memory.add("sequence_error", args.sequence_error, 2 * sizeof(int32_t), Access::kWrite,
             sizeof(int32_t));
  return {};
}

void set_offsets(const float8_attention_forward_args& args, kernels::AttentionPackedCastArgs& to) {
  const AttentionSizes& sizes = args.sizes;
  to.offsets_q = args.cu_seqlens_q;
  to.offsets_k = args.cu_seqlens_kv;
  to.longest_q = static_cast<int32_t>(std::min(sizes.longest_q, sizes.tokens_q));
  to.longest_k = static_cast<int32_t>(std::min(sizes.longest_kv, sizes.tokens_kv));
  to.error = reinterpret_cast<int32_t*>(args.sequence_error);
}

float8_heads dense_heads(const void* data, const AttentionDesc& desc, const AttentionSizes& sizes,
                         OfKeys of_keys) {
  const bool keys = of_keys == OfKeys::kYes;
  const int64_t of_token = (keys ? desc.heads_kv : desc.heads_q) * desc.head_dim;
  return {const_cast<void*>(data), (keys ? sizes.tokens_kv : sizes.tokens_q) * of_token,
          desc.head_dim, of_token};
}

}  // namespace f8::runtime
