// The ops of attention (ops.cpp says what they do).
#pragma once

#include <tuple>

#include "python/shim/tensors.hpp"

namespace float8_torch {

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k,
                                                     const Tensor& v, double scale, bool causal,
                                                     int64_t window, int64_t config);
std::tuple<Tensor, Tensor, Tensor> attention_dequantize(const Tensor& saved, const Tensor& o,
                                                        int64_t heads_kv, int64_t tokens_kv,
                                                        double scale, bool causal, int64_t window,
                                                        int64_t config);

}  // namespace float8_torch
