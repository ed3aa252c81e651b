// Attention in fp8 from bf16 operands: their casts, the forward, and the backward in fp8, or the values that one in bf16
// reads and this backward by a library.
#pragma once

#include <optional>

#include "runtime/attention/backward.hpp"
#include "runtime/attention/provider.hpp"

namespace f8::runtime {

class Fp8Attention final : public Attention {
 public:
  // Takes the checks of Attention::plan for granted.
  [[nodiscard]] static Result<std::shared_ptr<const Attention>> create(
      const std::shared_ptr<Context>& context, const AttentionDesc& desc);

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
  struct Kernels {
    const Kernel* sum_keys = nullptr;
    const Kernel* cast = nullptr;
    const Kernel* dequantize = nullptr;
    const Kernel* layout = nullptr;  // of packed sequences, or null
  };

  Fp8Attention(std::shared_ptr<Context> context, const AttentionDesc& desc,
               AttentionForward forward, std::optional<AttentionBackward> backward,
               Result<AttentionProviderPtr> provider, const Kernels& kernels)
      : Attention(std::move(context), desc),
        forward_(std::move(forward)),
        backward_(std::move(backward)),
        provider_(std::move(provider)),
        kernels_(kernels) {}

  enum Part : unsigned { kLayout = 1, kSumKeys = 2, kCast = 4, kAttend = 8, kAllParts = 15 };
  [[nodiscard]] Status run(const float8_attention_forward_args& args, Stream stream,
                           unsigned parts) const;
  // The backward in fp8.
  [[nodiscard]] Status run(const float8_attention_backward_args& args, Stream stream,
                           unsigned parts) const;
  // The backward in bf16.
  enum LibraryPart : unsigned { kDequantize = 1, kDifferentiate = 2, kWholeLibrary = 3 };
  [[nodiscard]] Status run_library(const float8_attention_backward_args& args, Stream stream,
                                   unsigned parts) const;
  [[nodiscard]] Status check_memory(const float8_attention_backward_args& args,
                                    size_t workspace_bytes, Stream stream) const;
  [[nodiscard]] Status launch_dequantize(const AttentionSizes& sizes, void* saved,
                                         const float8_heads& q, const float8_heads& k,
                                         const float8_heads& v, Stream stream) const;

  AttentionForward forward_;
  std::optional<AttentionBackward> backward_;  // in fp8
  Result<AttentionProviderPtr> provider_;      // of a backward in bf16, or why there is none
  Kernels kernels_;
};

}  // namespace f8::runtime
