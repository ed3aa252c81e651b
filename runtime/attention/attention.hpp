// Attention in fp8 from bf16 operands: their casts, the forward, and the values that a backward in bf16 reads, or the
// backward in fp8. A plan is immutable and shared between threads.
#pragma once

#include <optional>

#include "float8/attention.h"
#include "runtime/attention/backward.hpp"
#include "runtime/attention/forward.hpp"
#include "runtime/device/step.hpp"

namespace f8::runtime {

using AttentionSizes = float8_attention_sizes;

class Attention {
 public:
  // Loads the kernels. A scale of 0 is 1 / sqrt(head_dim).
  [[nodiscard]] static Result<std::shared_ptr<const Attention>> plan(
      const std::shared_ptr<Context>& context, const AttentionDesc& desc);

  // Refuses sizes that a call cannot have.
  [[nodiscard]] Status check(const AttentionSizes& sizes) const;
  // Of sizes that check() lets pass.
  [[nodiscard]] size_t saved_bytes(const AttentionSizes& sizes) const;
  [[nodiscard]] size_t workspace_bytes(const AttentionSizes& sizes) const;
  // It is 0 for a plan without fp8_backward.
  [[nodiscard]] size_t backward_workspace_bytes(const AttentionSizes& sizes) const;

  // Each enqueues its launches, or nothing without queries; no allocation, lock or synchronisation.
  [[nodiscard]] Status forward(const float8_attention_forward_args& args, Stream stream) const;
  [[nodiscard]] Status dequantize(const float8_attention_dequantize_args& args,
                                  Stream stream) const;
  [[nodiscard]] Status backward(const float8_attention_backward_args& args, Stream stream) const;
  // The launches of forward, and of a backward, or the one that a backward in bf16 needs, in order. Each reads what those
  // before it have left in the call's buffers.
  [[nodiscard]] std::vector<Step> forward_steps(const float8_attention_forward_args& args) const;
  [[nodiscard]] std::vector<Step> backward_steps(
      const float8_attention_dequantize_args& args) const;
  [[nodiscard]] std::vector<Step> backward_steps(const float8_attention_backward_args& args) const;

 private:
  Attention(std::shared_ptr<Context> context, const AttentionDesc& desc, AttentionForward forward,
            std::optional<AttentionBackward> backward, const Kernel& sum_keys, const Kernel& cast,
            const Kernel& dequantize, const Kernel* layout)
      : context_(std::move(context)),
        desc_(desc),
        forward_(std::move(forward)),
        backward_(std::move(backward)),
        sum_keys_(&sum_keys),
        cast_(&cast),
        dequantize_(&dequantize),
        layout_(layout) {}

  enum Part : unsigned { kLayout = 1, kSumKeys = 2, kCast = 4, kAttend = 8, kAllParts = 15 };
  [[nodiscard]] Status run(const float8_attention_forward_args& args, Stream stream,
                           unsigned parts) const;
  [[nodiscard]] Status run(const float8_attention_backward_args& args, Stream stream,
                           unsigned parts) const;

  std::shared_ptr<Context> context_;
  AttentionDesc desc_;
  AttentionForward forward_;
  std::optional<AttentionBackward> backward_;
  const Kernel* sum_keys_;
  const Kernel* cast_;
  const Kernel* dequantize_;
  const Kernel* layout_;  // of packed sequences, or null
};

}  // namespace f8::runtime
