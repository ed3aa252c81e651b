// The ops of a linear (ops.cpp says what they do).
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "python/shim/plans/plans.hpp"

namespace float8_torch {

std::tuple<Tensor, Tensor> linear_forward(
    const Tensor& x, const std::optional<Tensor>& x_q, const std::optional<Tensor>& x_qt,
    const Tensor& weight, const std::optional<Tensor>& w_q, const std::optional<Tensor>& w_qt,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& scales, int64_t config,
    int64_t layout, bool save, const std::optional<Tensor>& w_scales,
    const std::optional<Tensor>& w_state);
std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& dy, const Tensor& saved, const std::optional<Tensor>& x,
    const std::optional<Tensor>& x_qt, const Tensor& weight, const std::optional<Tensor>& w_qt,
    const std::optional<Tensor>& scales, int64_t config, int64_t layout, int64_t wanted,
    const std::optional<Tensor>& w_scales, int64_t w_shards, const std::optional<Tensor>& dy_q,
    const std::optional<Tensor>& dy_qt);
bool reads_shards(const Tensor& dy, const Tensor& weight, int64_t config);

int64_t saved_bytes_op(int64_t m, int64_t n, int64_t k, int64_t config, bool x_given, bool w_given);
std::tuple<int64_t, int64_t> quantized_bytes_op(int64_t rows, int64_t cols, int64_t config,
                                                int64_t operand, bool backward, int64_t whole_rows,
                                                bool of_activation);
void prepare(const Tensor& x, const Tensor& weight, std::vector<int64_t> n, std::vector<int64_t> k,
             int64_t m, int64_t config, bool apart);

}  // namespace float8_torch
