// The op of rotary positions (ops.cpp says what it does).
#pragma once

#include <tuple>

#include "python/shim/base/tensors.hpp"

namespace float8_torch {

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos,
                                  const Tensor& sin, int64_t dtype, bool inverse, bool tokens_first,
                                  bool q_in_memory, bool k_in_memory, int64_t config);

}  // namespace float8_torch
