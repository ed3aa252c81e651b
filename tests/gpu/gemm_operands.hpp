// Operands of a GEMM on the device, and its reference.
#pragma once

#include "runtime/gemm/gemm.hpp"
#include "tests/fp8_rows.hpp"
#include "tests/gpu/gpu_test.hpp"
#include "tests/gpu/quantize/scale_layout.hpp"

namespace f8::runtime::gpu {

inline constexpr double kPreciseBound = 2.5e-3;  // relative Frobenius error against fp64
inline constexpr double kFastBound = 1e-2;

// The operands' modes: with block scales a's blocks are 1x128, and with one for each row either
// operand may have a single one.
[[nodiscard]] inline codegen::ScaleMode operand_mode(codegen::ScaleMode scale, bool is_a,
                                                     bool scalar) {
  if (is_block(scale) && is_a) return codegen::ScaleMode::kBlock1x128;
  return scalar ? codegen::ScaleMode::kTensor : scale;
}

// a[m][k] and b[n][k] of random values, cast by the reference, rows a pitch apart.
struct GemmOperands {
  GemmOperands(const Context& context, Shape own, Dtype type_a, Dtype type_b,
               codegen::ScaleMode scale, uint64_t seed, bool scalar_a = false,
               bool scalar_b = false, bool pow2 = false)
      : shape(own),
        a(cast(own.m, own.k, type_a, operand_mode(scale, true, scalar_a), seed, pow2)),
        b(cast(own.n, own.k, type_b, operand_mode(scale, false, scalar_b), seed + 1, pow2)),
        device_a(context, fp8_rows(a)),
        device_b(context, fp8_rows(b)),
        inv_a(context, device_layout(a)),
        inv_b(context, device_layout(b)) {}

  static reference::Fp8Matrix cast(int64_t rows, int64_t cols, Dtype type, codegen::ScaleMode scale,
                                   uint64_t seed, bool pow2 = false) {
    // Neighbouring blocks of normal values have nearly the same scale; outliers tell them apart.
    const auto distribution =
        is_block(scale) ? reference::Distribution::kOutliers : reference::Distribution::kNormal;
    return reference::cast(reference::random_matrix(rows, cols, seed, distribution), over(scale),
                           type, pow2);
  }
  // Rows 0, step, 2 step, ... of a, for GEMMs whose whole reference would take too long.
  [[nodiscard]] reference::Fp8Matrix sampled_a(int64_t step) const {
    reference::Fp8Matrix out = a;
    out.bits.clear();
    const bool one_scale = a.over == reference::AmaxOver::kTensor;
    if (!one_scale) out.inv_scales.clear();
    const auto per_row =
        static_cast<std::ptrdiff_t>(a.inv_scales.size()) / static_cast<std::ptrdiff_t>(a.rows);
    out.rows = 0;
    for (int64_t r = 0; r < a.rows; r += step, ++out.rows) {
      const auto begin = a.bits.begin() + r * a.cols;
      out.bits.insert(out.bits.end(), begin, begin + a.cols);
      const auto scales = a.inv_scales.begin() + r * per_row;
      if (!one_scale) out.inv_scales.insert(out.inv_scales.end(), scales, scales + per_row);
    }
    if (!one_scale) out.scales = out.inv_scales;  // not read by the matmul
    return out;
  }
  [[nodiscard]] GemmCall call(const DeviceBuffer& d, int64_t m) const {
    return {device_a.as(), device_b.as(), d.as(), inv_a.as<float>(), inv_b.as<float>(), m};
  }

  Shape shape;
  reference::Fp8Matrix a, b;
  DeviceBuffer device_a, device_b, inv_a, inv_b;
};

[[nodiscard]] inline std::vector<double> result(const DeviceBuffer& d, Dtype type) {
  if (type != Dtype::kF16) return type == Dtype::kF32 ? d.f32() : d.bf16();
  std::vector<double> values;
  for (const uint16_t bits : d.download<uint16_t>()) {
    values.push_back(static_cast<double>(decode_f16(bits)));
  }
  return values;
}

// Rows 0, step, 2 step, ... of a row-major matrix.
[[nodiscard]] inline std::vector<double> sampled_rows(const std::vector<double>& values,
                                                      int64_t cols, int64_t step) {
  std::vector<double> out;
  for (size_t at = 0; at < values.size(); at += static_cast<size_t>(step * cols)) {
    out.insert(out.end(), values.begin() + static_cast<std::ptrdiff_t>(at),
               values.begin() + static_cast<std::ptrdiff_t>(at) + cols);
  }
  return out;
}

}  // namespace f8::runtime::gpu
