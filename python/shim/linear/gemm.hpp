// The op that multiplies two operands in fp8 (ops.cpp says what it does).
#pragma once

#include <optional>

#include "python/shim/base/tensors.hpp"

namespace float8_torch {

// The inverse scales of `lines` rows of `length` elements (float8_tensor).
[[nodiscard]] int64_t scale_count(int32_t granularity, int64_t lines, int64_t length);

void gemm_into(const Tensor& a, const Tensor& a_scales, const Tensor& b, const Tensor& b_scales,
               const Tensor& d, const std::optional<Tensor>& bias, int64_t contracted,
               int64_t config, int64_t kind, bool accumulate, int64_t sm_limit);

}  // namespace float8_torch
