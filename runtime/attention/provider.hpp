// Attention in bf16 by a library: cuDNN on a GPU, and its stand-in on an emulated device.
#pragma once

#include <memory>

#include "codegen/kernels/attention/attention_args.cuh"
#include "runtime/attention/attention.hpp"

namespace f8::runtime {

// The tensors of a call, dense heads by strides. Pointers may be null where only bytes are asked for.
struct ProviderCall {
  AttentionSizes sizes;
  float8_heads q, k, v, o;
  float* lse = nullptr;  // [batch][heads_q][tokens_q]: written by forward, read by backward
  float8_heads dout{}, dq{}, dk{}, dv{};
  const int32_t* offsets = nullptr;                 // [2][sequences + 1] of a pack, clean ones
  const kernels::AttentionBlock* blocks = nullptr;  // of a pack's queries, which forward reads
  float8_buffer workspace{};
};

enum class AttentionPass : uint8_t { kForward, kBackward };

class AttentionProvider {
 public:
  virtual ~AttentionProvider() = default;
  [[nodiscard]] virtual Result<size_t> workspace_bytes(AttentionPass pass,
                                                       const ProviderCall& call) const = 0;
  // There are queries, and the caller has checked the pointers.
  [[nodiscard]] virtual Status run(AttentionPass pass, const ProviderCall& call,
                                   Stream stream) const = 0;
};
using AttentionProviderPtr = std::unique_ptr<const AttentionProvider>;

// A backward with all that its arguments say whatever the recipe is: q, k, v, offsets and the workspace are the caller's.
[[nodiscard]] ProviderCall backward_call(const float8_attention_backward_args& args,
                                         const AttentionDesc& desc);

// What a provider needs for tensors that are all dense [batch][tokens][heads][head_dim]; 0 where it refuses them, which
// the call tells.
[[nodiscard]] size_t dense_workspace_bytes(const AttentionProvider& provider, AttentionPass pass,
                                           const AttentionDesc& desc, const AttentionSizes& sizes);

// Opens the context's library.
[[nodiscard]] Result<AttentionProviderPtr> open_attention_provider(
    const std::shared_ptr<Context>& context, const AttentionDesc& desc);

// The version of cuDNN, as 91900, or why there is none.
[[nodiscard]] Result<int> cudnn_version();

}  // namespace f8::runtime
