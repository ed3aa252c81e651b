// Attention under a recipe: in fp8 (fp8.hpp), or in bf16 by a library (bf16.hpp). A plan is immutable and shared between
// threads.
#pragma once

#include <memory>
#include <vector>

#include "float8/attention.h"
#include "runtime/attention/forward.hpp"
#include "runtime/device/step.hpp"

namespace f8::runtime {

using AttentionSizes = float8_attention_sizes;

class Attention {
 public:
  // Loads the kernels, or opens the library. A scale of 0 is 1 / sqrt(head_dim).
  [[nodiscard]] static Result<std::shared_ptr<const Attention>> plan(
      const std::shared_ptr<Context>& context, const AttentionDesc& desc);
  virtual ~Attention() = default;

  // Refuses sizes that a call cannot have.
  [[nodiscard]] Status check(const AttentionSizes& sizes) const;
  // These are of sizes that check() lets pass. What a library needs it says itself, and 0 where it cannot do it.
  [[nodiscard]] virtual size_t saved_bytes(const AttentionSizes& sizes) const = 0;
  [[nodiscard]] virtual size_t workspace_bytes(const AttentionSizes& sizes) const = 0;
  [[nodiscard]] virtual size_t backward_workspace_bytes(const AttentionSizes& sizes) const = 0;

  // Each enqueues its launches, or nothing without queries. Without a library there is no allocation, lock or
  // synchronisation.
  [[nodiscard]] virtual Status forward(const float8_attention_forward_args& args,
                                       Stream stream) const = 0;
  [[nodiscard]] virtual Status dequantize(const float8_attention_dequantize_args& args,
                                          Stream stream) const = 0;
  [[nodiscard]] virtual Status backward(const float8_attention_backward_args& args,
                                        Stream stream) const = 0;
  // The launches of forward and of backward, in order. Each reads what those before it have left in the call's buffers.
  [[nodiscard]] virtual std::vector<Step> forward_steps(
      const float8_attention_forward_args& args) const = 0;
  [[nodiscard]] virtual std::vector<Step> backward_steps(
      const float8_attention_backward_args& args) const = 0;

  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

 protected:
  Attention(std::shared_ptr<Context> context, const AttentionDesc& desc)
      : context_(std::move(context)), desc_(desc) {}

  std::shared_ptr<Context> context_;
  AttentionDesc desc_;
};

}  // namespace f8::runtime
