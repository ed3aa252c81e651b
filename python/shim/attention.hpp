// The ops of attention (ops.cpp says what they do).
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "python/shim/base/tensors.hpp"

namespace float8_torch {

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k,
                                                     const Tensor& v, double scale, bool causal,
                                                     int64_t window, int64_t config,
                                                     const std::optional<Tensor>& cu_seqlens_q,
                                                     const std::optional<Tensor>& cu_seqlens_k,
                                                     int64_t max_seqlen_q, int64_t max_seqlen_k,
                                                     int64_t recipe);
std::tuple<Tensor, Tensor, Tensor> attention_dequantize(const Tensor& saved, const Tensor& o,
                                                        int64_t heads_kv, int64_t tokens_kv,
                                                        double scale, bool causal, int64_t window,
                                                        int64_t config, int64_t sequences);
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const Tensor& o, const Tensor& lse, const Tensor& saved, int64_t heads_kv,
    int64_t tokens_kv, double scale, bool causal, int64_t window, int64_t config, int64_t sequences,
    int64_t recipe, const std::optional<Tensor>& q, const std::optional<Tensor>& k,
    const std::optional<Tensor>& v, int64_t max_seqlen_q, int64_t max_seqlen_k);
std::vector<int64_t> sequence_errors();
int64_t cudnn_version();

}  // namespace float8_torch
