// The ops of expert linears (ops.cpp says what they do).
#pragma once

#include <tuple>
#include <vector>

#include "python/shim/base/tensors.hpp"

namespace float8_torch {

Tensor experts_layout(const Tensor& offsets, int64_t m, int64_t config);
std::tuple<Tensor, Tensor> experts_forward(
    const Tensor& x, const Tensor& weight, const Tensor& layout, int64_t config, bool save,
    const std::optional<Tensor>& scales, int64_t scale_layout, const std::optional<Tensor>& w_q,
    const std::optional<Tensor>& w_scales, const std::optional<Tensor>& x_amax,
    const std::optional<Tensor>& x_row_amax, const std::optional<Tensor>& w_amax);
std::tuple<Tensor, Tensor> experts_backward(
    const Tensor& dy, const Tensor& saved, const Tensor& layout,
    const std::optional<Tensor>& weight, int64_t experts, int64_t n, int64_t k, int64_t grad_dtype,
    int64_t config, int64_t wanted, const std::optional<Tensor>& x,
    const std::optional<Tensor>& scales, int64_t scale_layout, const std::optional<Tensor>& w_qt,
    const std::optional<Tensor>& w_scales, const std::optional<Tensor>& dy_amax,
    const std::optional<Tensor>& dy_row_amax, const std::optional<Tensor>& w_amax);
std::tuple<int64_t, int64_t> experts_bytes(int64_t m, int64_t experts, int64_t n, int64_t k,
                                           int64_t config);
std::tuple<Tensor, Tensor, Tensor, Tensor> moe_forward(
    const Tensor& x, const std::optional<Tensor>& index, const Tensor& w13, const Tensor& w2,
    const Tensor& layout, int64_t config, bool save, const std::optional<Tensor>& w13_q,
    const std::optional<Tensor>& w13_scales, const std::optional<Tensor>& w2_q,
    const std::optional<Tensor>& w2_scales, const std::optional<Tensor>& w3,
    const std::optional<Tensor>& w13_state, const std::optional<Tensor>& w2_state,
    int64_t scale_layout);
std::tuple<Tensor, Tensor> moe_backward(
    const Tensor& x, const std::optional<Tensor>& dy, const std::optional<Tensor>& index,
    const std::optional<Tensor>& score, const std::optional<Tensor>& w13,
    const std::optional<Tensor>& w2, const std::vector<Tensor>& read, const Tensor& layout,
    int64_t experts, int64_t hidden, int64_t grad_dtype, int64_t config, int64_t part,
    int64_t wanted, const std::optional<Tensor>& w13_qt, const std::optional<Tensor>& w13_scales,
    const std::optional<Tensor>& w2_qt, const std::optional<Tensor>& w2_scales,
    const std::optional<Tensor>& w3, const std::optional<Tensor>& w13_state,
    const std::optional<Tensor>& w2_state, int64_t scale_layout);
std::tuple<int64_t, int64_t, int64_t, int64_t> moe_bytes(int64_t m, int64_t experts, int64_t hidden,
                                                         int64_t dim, int64_t dtype,
                                                         int64_t config);
std::vector<int64_t> routing_errors();

}  // namespace float8_torch
