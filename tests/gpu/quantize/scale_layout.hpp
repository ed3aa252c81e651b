// Scales of the reference as the device keeps them: codegen's ScaleMode says where each lies.
#pragma once

#include <vector>

#include "codegen/kernels/kernel_args.cuh"
#include "recipes/reference/reference.hpp"
#include "runtime/gemm/gemm.hpp"

namespace f8::runtime::gpu {

[[nodiscard]] inline reference::AmaxOver over(codegen::ScaleMode mode) {
  switch (mode) {
    case codegen::ScaleMode::kTensor:
      return reference::AmaxOver::kTensor;
    case codegen::ScaleMode::kAxis:
      return reference::AmaxOver::kRow;
    case codegen::ScaleMode::kBlock1x128:
      return reference::AmaxOver::kBlock1x128;
    case codegen::ScaleMode::kBlock128x128:
      return reference::AmaxOver::kBlock128x128;
  }
  return reference::AmaxOver::kTensor;
}

// The inverse scales as the device has them: blocks of K by rows for block1x128, padded rows for
// both kinds of block.
[[nodiscard]] inline std::vector<float> device_layout(const reference::Fp8Matrix& x) {
  using reference::AmaxOver;
  if (x.over != AmaxOver::kBlock1x128 && x.over != AmaxOver::kBlock128x128) return x.inv_scales;
  const int64_t blocks = ceil_div(x.cols, 128);
  const bool is_1x128 = x.over == AmaxOver::kBlock1x128;
  const int64_t height = is_1x128 ? x.rows : ceil_div(x.rows, 128);
  const int64_t stride = kernels::padded_scales(is_1x128 ? height : blocks);
  std::vector<float> out(static_cast<size_t>((is_1x128 ? blocks : height) * stride));
  for (int64_t i = 0; i < height; ++i) {
    for (int64_t b = 0; b < blocks; ++b) {
      out[static_cast<size_t>(is_1x128 ? b * stride + i : i * stride + b)] =
          x.inv_scales[static_cast<size_t>(i * blocks + b)];
    }
  }
  return out;
}

}  // namespace f8::runtime::gpu
