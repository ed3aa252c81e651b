// Attention of recipe bf16, forward and backward by a library.
#pragma once

#include "runtime/attention/provider.hpp"

namespace f8::runtime {

class Bf16Attention final : public Attention {
 public:
  // Takes the checks of Attention::plan for granted. It refuses packed sequences.
  [[nodiscard]] static Result<std::shared_ptr<const Attention>> create(
      const std::shared_ptr<Context>& context, const AttentionDesc& desc);

  // A backward reads the caller's q, k and v.
  [[nodiscard]] size_t saved_bytes(const AttentionSizes&) const override { return 0; }
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
                AttentionProviderPtr provider)
      : Attention(std::move(context), desc), provider_(std::move(provider)) {}

  AttentionProviderPtr provider_;
};

}  // namespace f8::runtime
