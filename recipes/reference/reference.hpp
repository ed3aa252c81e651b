// The CPU reference of every kernel: bit for bit the specification of the casts, fp64 for the
// matmuls. Matrices are row-major and dense, [rows][cols].
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "recipes/dtype.hpp"
#include "recipes/problem.hpp"
#include "recipes/recipe.hpp"
#include "recipes/scales/scale.hpp"

namespace f8::reference {

// A high-precision matrix as floats holding exactly representable values of its type (bf16, f16 or
// f32).
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<float> values;
  [[nodiscard]] float at(int64_t r, int64_t c) const {
    return values[static_cast<size_t>(r * cols + c)];
  }
};
[[nodiscard]] Matrix transpose(const Matrix& x);

// The elements that share one scale.
enum class AmaxOver { kTensor, kRow, kColumn, kBlock1x128, kBlock128x128 };

// Gives the amaxes, row-major. NaN propagates, without its sign.
//   kTensor          1
//   kRow             rows: one for each row, reduced over the columns
//   kColumn          cols
//   kBlock1x128      rows * ceil(cols/128)
//   kBlock128x128    ceil(rows/128) * ceil(cols/128)
[[nodiscard]] std::vector<float> amax(const Matrix& x, AmaxOver over);

struct Fp8Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  Dtype dtype = Dtype::kE4m3;
  AmaxOver over = AmaxOver::kTensor;
  std::vector<uint8_t> bits;
  std::vector<float> scales;  // towards fp8; laid out as amax() lays it out
  std::vector<float> inv_scales;
  int64_t first_row = 0;  // of a shard, in the whole that its scales are of
};

[[nodiscard]] Fp8Matrix cast(const Matrix& x, AmaxOver over, Dtype dtype, bool pow2,
                             NonFinite non_finite = NonFinite::kPropagate);
// Casts with amaxes from elsewhere (delayed scaling, a group of ranks), laid out as amax() lays
// them out.
[[nodiscard]] Fp8Matrix cast_with_amax(const Matrix& x, AmaxOver over, Dtype dtype, bool pow2,
                                       std::span<const float> amax,
                                       NonFinite non_finite = NonFinite::kPropagate);
// Casts with scales from elsewhere, laid out likewise.
[[nodiscard]] Fp8Matrix cast_with_scales(const Matrix& x, AmaxOver over, Dtype dtype,
                                         std::vector<float> scales);
// Casts with a delayed scale, which knows nothing of x: under kPropagate infinities become NaN, so
// that they show as they do where the scale is x's own; under kSaturate they saturate.
[[nodiscard]] Fp8Matrix cast_delayed(const Matrix& x, Dtype dtype, float scale,
                                     NonFinite non_finite = NonFinite::kPropagate);
// Gives the transposed copy [cols][rows]. `over` is about the result, so kRow here reduces x over
// its rows.
[[nodiscard]] Fp8Matrix cast_transposed(const Matrix& x, AmaxOver over, Dtype dtype, bool pow2);

// A shard is some rows of a whole tensor, as ranks hold them. Those of 128x128 blocks of the whole may
// be cut by it. Both functions lay out as amax() does for the whole.
//
// Gives the amaxes of the blocks over the shard's rows alone, 0 where it has none of a block. Their
// maxima over the shards (NaN above all) are those of the whole.
[[nodiscard]] std::vector<float> shard_amax(const Matrix& x, int64_t first_row, int64_t whole_rows);
// Casts the shard with the amaxes of the whole, to the bits of its rows in the whole's cast. All
// scales of the whole are with it.
[[nodiscard]] Fp8Matrix cast_shard(const Matrix& x, int64_t first_row, Dtype dtype, bool pow2,
                                   std::span<const float> amax,
                                   NonFinite non_finite = NonFinite::kPropagate);

// Counts what became of the elements of x in its copy.
struct CastCounts {
  uint64_t saturated = 0;   // finite ones that rounding would have taken beyond the largest value
  uint64_t flushed = 0;     // finite ones, not 0, that became 0
  uint64_t non_finite = 0;  // infinite ones and NaN in x
  bool operator==(const CastCounts&) const = default;
};
[[nodiscard]] CastCounts count_cast(const Matrix& x, const Fp8Matrix& copy);

// The gradient of a bias: the sums of the columns, in fp32. The order is part of the contract:
// first the sums of each 8 rows; then those of the 16 such groups of 128 rows; then, for each of
// the first 8 of these, the sum of it and every 8th that follows; then the sum of these 8. Rows
// that are missing in the last 128 count as 0.
[[nodiscard]] std::vector<float> column_sums(const Matrix& x);

// d[m,n] = sum_k a[m,k] b[n,k] with the inverse scales applied, in fp64; a and b hold K last.
[[nodiscard]] std::vector<double> matmul(const Fp8Matrix& a, const Fp8Matrix& b);
[[nodiscard]] std::vector<double> matmul(const Matrix& a, const Matrix& b);
// Takes dense a [m][k] and b [n][k]; each sum is in the order of k.
[[nodiscard]] std::vector<double> matmul(std::span<const double> a, std::span<const double> b,
                                         size_t m, size_t n, size_t k);

// Delayed scaling has a state that the reference does not keep: an operand with that setting is
// scaled by the amax that is given for its tensor here, else by its own amax, as if dynamic.
struct DelayedAmax {
  std::optional<float> x, w, dy;
};

// The linear under a recipe: x [M,K], w [N,K], dy [M,N]. An operand that its GEMM needs transposed
// is transposed first and then scaled, so axis and blocks lie along K. Results are fp64, before the
// rounding to the output type; `fast` makes no difference here. The error is kInvalidArgument if
// the recipe is invalid or the matrices do not fit together; `output` does not look at dy.
[[nodiscard]] Result<std::vector<double>> linear_gemm(const Recipe& recipe, Gemm gemm,
                                                      const Matrix& x, const Matrix& w,
                                                      const Matrix& dy,
                                                      const DelayedAmax& delayed = {},
                                                      NonFinite non_finite = NonFinite::kPropagate);
struct LinearResult {
  std::vector<double> y, dx, dw;  // [M,N], [M,K], [N,K]
};
[[nodiscard]] Result<LinearResult> linear(const Recipe& recipe, const Matrix& x, const Matrix& w,
                                          const Matrix& dy, const DelayedAmax& delayed = {},
                                          NonFinite non_finite = NonFinite::kPropagate);

// relative_error is ||reference - x|| / ||reference||, and sqnr_db is 20 log10 of its inverse.
// Lengths that differ give NaN, which fails every bound.
[[nodiscard]] double relative_error(std::span<const double> reference, std::span<const double> x);
[[nodiscard]] double sqnr_db(std::span<const double> reference, std::span<const double> x);

// --- test data ---
enum class Distribution {
  kUniform,   // [-1, 1]
  kNormal,    // mean 0, standard deviation 1
  kOutliers,  // normal, and about one element in 256 is 64 times as large
};
// Gives values rounded to bf16. An element depends on its index and the seed alone.
[[nodiscard]] Matrix random_matrix(int64_t rows, int64_t cols, uint64_t seed,
                                   Distribution distribution = Distribution::kNormal);
// rounded_to rounds the values to a type. to_bytes gives the bytes of such a matrix with rows `ld`
// elements apart (0: dense) and `fill` between them.
[[nodiscard]] Matrix rounded_to(const Matrix& x, Dtype type);
[[nodiscard]] std::vector<uint8_t> to_bytes(const Matrix& x, Dtype type, int64_t ld = 0,
                                            uint8_t fill = 0);
[[nodiscard]] std::vector<uint16_t> to_bf16_bits(const Matrix& x);
[[nodiscard]] Matrix from_bf16_bits(int64_t rows, int64_t cols, std::span<const uint16_t> bits);
[[nodiscard]] std::vector<double> to_doubles(const Matrix& x);

}  // namespace f8::reference
