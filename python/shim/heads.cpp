#include "python/shim/heads.hpp"

#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>

namespace float8_torch {

void refuse_heads(const char* op, const std::string& what) {
  throw std::invalid_argument(std::string("float8: ") + op + ": " + what);
}

Heads as_heads(const Tensor& tensor, const Place& place, const char* op, const char* name,
               bool tokens_first) {
  constexpr int64_t kStep = 8;  // elements of 16 bytes, or more
  if (tensor.dim() != 4) {
    refuse_heads(op,
                 std::string(name) + (tokens_first ? " is not [batch, tokens, heads, head_dim]"
                                                   : " is not [batch, heads, tokens, head_dim]"));
  }
  if (device_of(tensor) != place.device) {
    refuse_heads(op, std::string(name) + " is on another device");
  }
  check_memory(tensor, name);
  const auto is_fit = [](const Tensor& of) {
    return of.stride(3) == 1 && of.stride(0) % kStep == 0 && of.stride(1) % kStep == 0 &&
           of.stride(2) % kStep == 0 &&
           reinterpret_cast<uintptr_t>(of.mutable_data_ptr()) % 16 == 0;
  };
  Tensor keep = tensor;
  if (!is_fit(keep)) keep = torch::stable::contiguous(keep);
  if (!is_fit(keep)) keep = torch::stable::clone(keep);
  return {keep,
          {keep.mutable_data_ptr(), keep.stride(0), keep.stride(tokens_first ? 2 : 1),
           keep.stride(tokens_first ? 1 : 2)}};
}

}  // namespace float8_torch
