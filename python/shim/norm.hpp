// The ops of RMSNorms (ops.cpp says what they do).
#pragma once

#include <tuple>

#include "python/shim/base/tensors.hpp"

namespace float8_torch {

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps,
                                    double weight_offset, int64_t rounding, int64_t dtype,
                                    bool with_rstd, int64_t config);
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x,
                                             const Tensor& weight, const Tensor& rstd,
                                             double weight_offset, int64_t rounding, bool with_dx,
                                             bool with_dweight, int64_t config);

}  // namespace float8_torch
