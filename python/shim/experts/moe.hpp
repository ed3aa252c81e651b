// The ops that route tokens to experts and combine their rows (ops.cpp says what they do).
#pragma once

#include <optional>
#include <tuple>

#include "python/shim/base/tensors.hpp"

namespace float8_torch {

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_route(const Tensor& topk_ids,
                                                     const std::optional<Tensor>& topk_scores,
                                                     int64_t experts, int64_t config);
Tensor moe_combine(const Tensor& y, const std::optional<Tensor>& topk_scores,
                   const Tensor& position, const Tensor& offsets, int64_t config);
Tensor moe_score_gradient(const Tensor& dout, const Tensor& y, const Tensor& position,
                          const Tensor& offsets, int64_t config);

}  // namespace float8_torch
