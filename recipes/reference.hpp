// The CPU reference of every kernel: bit for bit the specification of the casts, fp64 for the
// matmuls. Matrices are row-major and dense, [rows][cols], unless a leading dimension is given.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "recipes/dtype.hpp"
#include "recipes/problem.hpp"
#include "recipes/recipe.hpp"

namespace f8::reference {

// A high-precision matrix as floats holding exactly representable values of `dtype` (bf16, f16 or
// f32).
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<float> values;
  [[nodiscard]] float at(int64_t r, int64_t c) const {
    return values[static_cast<size_t>(r * cols + c)];
  }
};

// Which elements share one scale.
enum class AmaxOver { kTensor, kRow, kColumn, kBlock1x128, kBlock128x128 };

// kTensor: 1 value; kRow: rows (one for each row, reduced over the columns); kColumn: cols;
// kBlock1x128: rows * ceil(cols/128), row-major; kBlock128x128: ceil(rows/128) * ceil(cols/128),
// row-major.
[[nodiscard]] std::vector<float> amax(const Matrix& x, AmaxOver over);

struct Fp8Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  Dtype dtype = Dtype::kE4m3;
  AmaxOver over = AmaxOver::kTensor;
  std::vector<uint8_t> bits;
  std::vector<float> scales;  // towards fp8; laid out as amax() lays it out
  std::vector<float> inv_scales;
};

[[nodiscard]] Fp8Matrix cast(const Matrix& x, AmaxOver over, Dtype dtype, bool pow2);
// The transposed copy [cols][rows]; `over` speaks of the result, so kRow here reduces x over its
// rows.
[[nodiscard]] Fp8Matrix cast_transposed(const Matrix& x, AmaxOver over, Dtype dtype, bool pow2);

// d[m,n] = sum_k a[m,k] b[n,k] with the inverse scales applied, in fp64; a and b hold K last.
[[nodiscard]] std::vector<double> matmul(const Fp8Matrix& a, const Fp8Matrix& b);
[[nodiscard]] std::vector<double> matmul(const Matrix& a, const Matrix& b);

// The linear under a recipe. Results are fp64, before the rounding to the output type.
[[nodiscard]] Result<std::vector<double>> linear_gemm(const Recipe& recipe, Gemm gemm,
                                                      const Matrix& x, const Matrix& w,
                                                      const Matrix& dy);
struct LinearResult {
  std::vector<double> y, dx, dw;  // [M,N], [M,K], [N,K]
};
[[nodiscard]] Result<LinearResult> linear(const Recipe& recipe, const Matrix& x, const Matrix& w,
                                          const Matrix& dy);

[[nodiscard]] double relative_error(std::span<const double> reference, std::span<const double> x);
[[nodiscard]] double sqnr_db(std::span<const double> reference, std::span<const double> x);

}  // namespace f8::reference
