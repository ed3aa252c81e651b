// Tensors of heads, as attention and rotary positions read them.
#pragma once

#include "python/shim/plans/workspace.hpp"

namespace float8_torch {

// A tensor [batch, heads, tokens, head_dim], or one whose tokens come before its heads. `keep` owns the data.
struct Heads {
  Tensor keep;
  float8_heads heads;
};

// Throws with the name of the op and of its tensor.
[[noreturn]] void refuse_heads(const char* op, const std::string& what);

// Copies only where the elements of a head do not lie side by side, or are not aligned to 16 bytes. Throws where
// the tensor is none of heads, or on another device.
[[nodiscard]] Heads as_heads(const Tensor& tensor, const Place& place, const char* op,
                             const char* name, bool tokens_first = false);

}  // namespace float8_torch
