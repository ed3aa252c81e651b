// Attention of recipe bf16, forward and backward by a library. Packed sequences have their layout before the forward, which
// leaves their clean offsets in `saved`.
#pragma once

#include "runtime/attention/provider.hpp"

namespace f8::runtime {

class Bf16Attention final : public Attention {
 public:
  // Takes the checks of Attention::plan for granted.
  [[nodiscard]] static Result<std::shared_ptr<const Attention>> create(
      const std::shared_ptr<Context>& context, const AttentionDesc& desc);

  // A backward reads the caller's q, k and v, and of packed sequences where they lie.
  [[nodiscard]] size_t saved_bytes(const AttentionSizes& sizes) const override;
  [[nodiscard]] size_t workspace_bytes(const AttentionSizes& sizes) const override;
  [[nodiscard]] size_t backward_workspace_bytes(const AttentionSizes& sizes) const override;
  [[nodiscard]] Status forward(const float8_attention_forward_args& args,
                               Stream stream) const override;
  [[nodiscard]] Status dequantize(const float8_attention_dequantize_args& args,
                                  Stream stream) const override;
  [[nodiscard]] Status backward(const float8_attention_backward_args& args,
                                Stream stream) const override;
  [[nodiscard]] std::vector<Step> forward_steps(
      const float8_attention_forward_args& args) const override;
  [[nodiscard]] std::vector<Step> backward_steps(
      const float8_attention_backward_args& args) const override;

 private:
  Bf16Attention(std::shared_ptr<Context> context, const AttentionDesc& desc,
                AttentionProviderPtr provider, const Kernel* layout)
      : Attention(std::move(context), desc), provider_(std::move(provider)), layout_(layout) {}

  enum Part : unsigned { kLayout = 1, kAttend = 2, kAllParts = 3 };
  [[nodiscard]] Status run(const float8_attention_forward_args& args, Stream stream,
                           unsigned parts) const;
  [[nodiscard]] Status launch_layout(const float8_attention_forward_args& args,
                                     Stream stream) const;

  AttentionProviderPtr provider_;
  const Kernel* layout_;  // of packed sequences, or null
};

}  // namespace f8::runtime
