// Attention in fp8 or in bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "float8/attention.h"
#include "float8/context.hpp"
#include "float8/rotary.h"

namespace float8 {

using AttentionSizes = float8_attention_sizes;
using Heads = float8_heads;
using SequenceError = float8_sequence_error;
using AttentionForwardArgs = float8_attention_forward_args;
using AttentionDequantizeArgs = float8_attention_dequantize_args;
using AttentionBackwardArgs = float8_attention_backward_args;
using RotaryArgs = float8_rotary_args;

struct AttentionDesc {
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t head_dim = 0;
  float scale = 0;  // 0: 1 / sqrt(head_dim)
  bool causal = false;
  float8_dtype dtype = FLOAT8_BF16;
  bool packed = false;
  std::int64_t window = 0;  // 0: all keys
  float8_attention_recipe recipe = FLOAT8_ATTENTION_FP8_FORWARD;
};

// Attention. Copies are the same plan. The bytes of buffers are 0 for sizes that a call refuses.
class Attention {
 public:
  static Result<Attention> plan(const Context& context, const AttentionDesc& desc) {
    float8_attention_desc c{};
    c.struct_size = sizeof c;
    c.heads_q = desc.heads_q;
    c.heads_kv = desc.heads_kv;
    c.head_dim = desc.head_dim;
    c.scale = desc.scale;
    c.causal = desc.causal ? 1 : 0;
    c.dtype = desc.dtype;
    c.packed = desc.packed ? 1 : 0;
    c.window = desc.window;
    c.recipe = desc.recipe;
    float8_attention* handle = nullptr;
    const float8_status status = float8_attention_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Attention(handle);
  }
  [[nodiscard]] std::size_t saved_bytes(const AttentionSizes& sizes) const {
    return float8_attention_saved_bytes(handle_.get(), &sizes);
  }
  [[nodiscard]] std::size_t workspace_bytes(const AttentionSizes& sizes) const {
    return float8_attention_workspace_bytes(handle_.get(), &sizes);
  }
  [[nodiscard]] std::size_t backward_workspace_bytes(const AttentionSizes& sizes) const {
    return float8_attention_backward_workspace_bytes(handle_.get(), &sizes);
  }
  Status forward(const AttentionForwardArgs& args, float8_stream stream) const {
    return Status(float8_attention_forward(handle_.get(), &args, stream));
  }
  // Writes q, k and v as the forward multiplied them, for a backward of your own.
  Status dequantize(const AttentionDequantizeArgs& args, float8_stream stream) const {
    return Status(float8_attention_dequantize(handle_.get(), &args, stream));
  }
  Status backward(const AttentionBackwardArgs& args, float8_stream stream) const {
    return Status(float8_attention_backward(handle_.get(), &args, stream));
  }
  [[nodiscard]] const float8_attention* get() const { return handle_.get(); }

 private:
  explicit Attention(float8_attention* handle) : handle_(handle, float8_attention_destroy) {}
  std::shared_ptr<const float8_attention> handle_;
};

// Gives queries and keys their rotary positions, or turns their gradients back.
inline Status rotary(const Context& context, const RotaryArgs& args, float8_stream stream) {
  return Status(float8_rotary(context.get(), &args, stream));
}

}  // namespace float8
