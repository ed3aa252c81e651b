// The op that updates weights (ops.cpp says what it does).
#pragma once

#include <optional>
#include <vector>

#include "python/shim/base/tensors.hpp"

namespace float8_torch {

void adamw(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
           std::vector<Tensor> exp_avg_sqs, std::vector<Tensor> max_exp_avg_sqs,
           std::vector<Tensor> steps, std::vector<Tensor> amax, std::vector<Tensor> row_amax,
           std::vector<Tensor> states, std::vector<Tensor> copies, std::vector<int64_t> config,
           std::vector<int64_t> dtypes, std::vector<int64_t> rows_max, std::vector<Tensor> scales,
           int64_t layout, std::vector<double> options, bool maximize,
           const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_scale,
           const std::optional<Tensor>& found_inf);

}  // namespace float8_torch
