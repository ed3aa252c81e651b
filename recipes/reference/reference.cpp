// Plain loops over whole matrices; only the fp64 matmul is arranged for speed, since tests run it
// on matrices of 512 and more.
#include "recipes/reference/reference.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numbers>
#include <utility>

#include "recipes/scales/scale.hpp"

namespace f8::reference {
namespace {

constexpr int64_t kBlock = 128;

int64_t blocks_of(int64_t extent) {
  return (extent + kBlock - 1) / kBlock;
}

// The place of an element's scale: element (r, c) has scale (r / row_extent) * row_stride +
// c / col_extent.
struct ScaleGrid {
  int64_t count;
  int64_t row_extent;
  int64_t col_extent;
  int64_t row_stride;

  [[nodiscard]] size_t index(int64_t r, int64_t c) const {
    return static_cast<size_t>(r / row_extent * row_stride + c / col_extent);
  }
};

ScaleGrid scale_grid(int64_t rows, int64_t cols, AmaxOver over) {
  const int64_t all_rows = std::max<int64_t>(rows, 1);
  const int64_t all_cols = std::max<int64_t>(cols, 1);
  switch (over) {
    case AmaxOver::kTensor:
      break;
    case AmaxOver::kRow:
      return {rows, 1, all_cols, 1};
    case AmaxOver::kColumn:
      return {cols, all_rows, 1, 0};
    case AmaxOver::kBlock1x128:
      return {rows * blocks_of(cols), 1, kBlock, blocks_of(cols)};
    case AmaxOver::kBlock128x128:
      return {blocks_of(rows) * blocks_of(cols), kBlock, kBlock, blocks_of(cols)};
  }
  return {1, all_rows, all_cols, 0};
}

AmaxOver amax_over(Granularity g) {
  switch (g) {
    case Granularity::kTensor:
      return AmaxOver::kTensor;
    case Granularity::kAxis:
      return AmaxOver::kRow;
    case Granularity::kBlock1x128:
      return AmaxOver::kBlock1x128;
    case Granularity::kBlock128x128:
      return AmaxOver::kBlock128x128;
  }
  return AmaxOver::kTensor;
}

// Calls visit(element, scale) with the indices of each of rows x cols elements, of which the first row
// is `first_row` of the matrix that the grid is of. It divides once a row, not once an element.
template <typename Visit>
void for_each_element(const ScaleGrid& grid, int64_t first_row, int64_t rows, int64_t cols,
                      const Visit& visit) {
  size_t element = 0;
  for (int64_t r = 0; r < rows; ++r) {
    size_t scale = grid.index(first_row + r, 0);
    for (int64_t c = 0; c < cols; c += grid.col_extent, ++scale) {
      const size_t end = element + static_cast<size_t>(std::min(grid.col_extent, cols - c));
      for (; element < end; ++element) visit(element, scale);
    }
  }
}

std::vector<double> dequantize(const Fp8Matrix& x) {
  std::vector<double> values(x.bits.size());
  for_each_element(scale_grid(x.rows, x.cols, x.over), x.first_row, x.rows, x.cols,
                   [&](size_t element, size_t scale) {
                     // The product of 4 bits and 24 is exact.
                     values[element] = static_cast<double>(decode_fp8(x.bits[element], x.dtype)) *
                                       static_cast<double>(x.inv_scales[scale]);
                   });
  return values;
}

struct Operand {
  const Matrix& matrix;
  bool transposed;
  std::optional<float> delayed_amax;
};

Fp8Matrix cast_operand(const Matrix& x, const CastSetting& setting, const Operand& operand,
                       NonFinite non_finite) {
  const AmaxOver over = amax_over(setting.granularity);
  if (setting.scaling == Scaling::kDelayed && operand.delayed_amax) {
    const float scale = scale_from_amax(*operand.delayed_amax, setting.dtype, setting.pow2);
    return cast_delayed(x, setting.dtype, scale, non_finite);
  }
  return cast(x, over, setting.dtype, setting.pow2, non_finite);
}

Status check_matrix(const char* name, const Matrix& x, int64_t rows, int64_t cols) {
  if (x.rows == rows && x.cols == cols && x.values.size() == static_cast<size_t>(rows * cols)) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "matrix {} is [{}][{}] with {} values; expected [{}][{}]", name, x.rows, x.cols,
              x.values.size(), rows, cols);
}

// splitmix64: a good 64-bit hash of a counter.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

double unit(uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

double draw(uint64_t key, Distribution distribution) {
  const double u = unit(mix(key));
  if (distribution == Distribution::kUniform) return 2.0 * u - 1.0;
  const uint64_t other = mix(key ^ 0xd1b54a32d192ed03U);
  const double normal =
      std::sqrt(-2.0 * std::log(1.0 - u)) * std::cos(2.0 * std::numbers::pi * unit(other));
  // The low bits of `other` are not in unit().
  return distribution == Distribution::kOutliers && (other & 0xff) == 0 ? 64.0 * normal : normal;
}

// The amaxes of x, whose first row is `first_row` of the matrix that the grid is of.
std::vector<float> amax_in(const ScaleGrid& grid, const Matrix& x, int64_t first_row) {
  std::vector<uint32_t> largest(static_cast<size_t>(grid.count));
  for_each_element(grid, first_row, x.rows, x.cols, [&](size_t element, size_t scale) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x.values[element]) & 0x7fffffff;
    largest[scale] = std::max(largest[scale], magnitude);
  });
  std::vector<float> result(largest.size());
  std::ranges::transform(largest, result.begin(),
                         [](uint32_t bits) { return std::bit_cast<float>(bits); });
  return result;
}

std::vector<float> scales_of(std::span<const float> amax, Dtype dtype, bool pow2,
                             NonFinite non_finite) {
  std::vector<float> scales;
  for (const float value : amax) scales.push_back(scale_from_amax(value, dtype, pow2, non_finite));
  return scales;
}

// Casts such rows too, with all scales of that matrix.
Fp8Matrix cast_rows(const Matrix& x, int64_t first_row, AmaxOver over, Dtype dtype,
                    std::vector<float> scales) {
  const ScaleGrid grid = scale_grid(x.rows, x.cols, over);
  Fp8Matrix q{x.rows, x.cols, dtype, over, {}, std::move(scales), {}, first_row};
  for (const float scale : q.scales) q.inv_scales.push_back(inverse_scale(scale));
  q.bits.resize(x.values.size());
  for_each_element(grid, first_row, x.rows, x.cols, [&](size_t element, size_t scale) {
    q.bits[element] = cast_to_fp8(x.values[element], q.scales[scale], dtype);
  });
  return q;
}

// A tile of the matmul: its sums stay in registers while K passes, in the order of K.
constexpr size_t kTileRows = 4;
constexpr size_t kTileColumns = 8;
using TileRows = std::array<const double*, kTileRows>;
using TileSums = std::array<std::array<double, kTileColumns>, kTileRows>;

[[gnu::always_inline]] inline void sum_tile_inline(const TileRows& a, const double* panel, size_t k,
                                                   TileSums& sums) {
  using Vector [[gnu::vector_size(32)]] = double;
  constexpr size_t kLanes = sizeof(Vector) / sizeof(double);
  constexpr size_t kVectors = kTileColumns / kLanes;
  Vector total[kTileRows][kVectors] = {};
  for (size_t p = 0; p < k; ++p) {
    for (size_t i = 0; i < kTileRows; ++i) {
      for (size_t j = 0; j < kVectors; ++j) {
        Vector b;
        std::memcpy(&b, panel + p * kTileColumns + j * kLanes, sizeof(b));
        total[i][j] += a[i][p] * b;
      }
    }
  }
  std::memcpy(&sums, total, sizeof(total));
}

void sum_tile(const TileRows& a, const double* panel, size_t k, TileSums& sums) {
  sum_tile_inline(a, panel, k, sums);
}

#ifdef __x86_64__
// Without fused multiply-adds, so that the bits are the same.
[[gnu::target("avx2")]] void sum_tile_avx2(const TileRows& a, const double* panel, size_t k,
                                           TileSums& sums) {
  sum_tile_inline(a, panel, k, sums);
}

auto* fastest_sum_tile() {
  return __builtin_cpu_supports("avx2") ? sum_tile_avx2 : sum_tile;
}
#else
auto* fastest_sum_tile() {
  return sum_tile;
}
#endif

}  // namespace

Matrix transpose(const Matrix& x) {
  Matrix t{x.cols, x.rows, std::vector<float>(x.values.size())};
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) t.values[static_cast<size_t>(c * x.rows + r)] = x.at(r, c);
  }
  return t;
}

std::vector<float> amax(const Matrix& x, AmaxOver over) {
  return amax_in(scale_grid(x.rows, x.cols, over), x, 0);
}

std::vector<float> shard_amax(const Matrix& x, int64_t first_row, int64_t whole_rows) {
  return amax_in(scale_grid(whole_rows, x.cols, AmaxOver::kBlock128x128), x, first_row);
}

Fp8Matrix cast_shard(const Matrix& x, int64_t first_row, Dtype dtype, bool pow2,
                     std::span<const float> amax, NonFinite non_finite) {
  std::vector<float> scales = scales_of(amax, dtype, pow2, non_finite);
  return cast_rows(x, first_row, AmaxOver::kBlock128x128, dtype, std::move(scales));
}

Fp8Matrix cast_with_amax(const Matrix& x, AmaxOver over, Dtype dtype, bool pow2,
                         std::span<const float> amax, NonFinite non_finite) {
  return cast_with_scales(x, over, dtype, scales_of(amax, dtype, pow2, non_finite));
}

Fp8Matrix cast_with_scales(const Matrix& x, AmaxOver over, Dtype dtype, std::vector<float> scales) {
  return cast_rows(x, 0, over, dtype, std::move(scales));
}

Fp8Matrix cast_delayed(const Matrix& x, Dtype dtype, float scale, NonFinite non_finite) {
  if (non_finite == NonFinite::kSaturate)
    return cast_with_scales(x, AmaxOver::kTensor, dtype, {scale});
  Matrix shown = x;
  for (float& value : shown.values) {
    if (std::isinf(value)) value = std::numeric_limits<float>::quiet_NaN();
  }
  return cast_with_scales(shown, AmaxOver::kTensor, dtype, {scale});
}

Fp8Matrix cast(const Matrix& x, AmaxOver over, Dtype dtype, bool pow2, NonFinite non_finite) {
  return cast_with_amax(x, over, dtype, pow2, amax(x, over), non_finite);
}

Fp8Matrix cast_transposed(const Matrix& x, AmaxOver over, Dtype dtype, bool pow2) {
  return cast(transpose(x), over, dtype, pow2);
}

CastCounts count_cast(const Matrix& x, const Fp8Matrix& copy) {
  const ScaleGrid grid = scale_grid(x.rows, x.cols, copy.over);
  CastCounts counts;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) {
      const float value = x.at(r, c);
      if (!std::isfinite(value)) {
        ++counts.non_finite;
        continue;
      }
      const float scaled = std::fabs(value * copy.scales[grid.index(copy.first_row + r, c)]);
      const uint8_t bits = copy.bits[static_cast<size_t>(r * x.cols + c)];
      // This is the midpoint to the next value, if there were one; a tie goes to the even mantissa.
      counts.saturated += copy.dtype == Dtype::kE4m3 ? scaled > 464.0F : scaled >= 61440.0F;
      counts.flushed += value != 0 && (bits & 0x7f) == 0;
    }
  }
  return counts;
}

std::vector<float> column_sums(const Matrix& x) {
  constexpr int64_t kGroup = 8;
  constexpr int64_t kLast = 8;
  std::vector<float> sums;
  for (int64_t c = 0; c < x.cols; ++c) {
    float last[kLast] = {};
    for (int64_t block = 0; block < blocks_of(x.rows); ++block) {
      float of_block = 0;
      for (int64_t group = 0; group < kBlock / kGroup; ++group) {
        float of_group = 0;
        for (int64_t i = 0; i < kGroup; ++i) {
          const int64_t r = block * kBlock + group * kGroup + i;
          const float value = r < x.rows ? x.at(r, c) : 0.0F;
          of_group = i == 0 ? value : of_group + value;
        }
        of_block = group == 0 ? of_group : of_block + of_group;
      }
      last[block % kLast] += of_block;
    }
    float sum = last[0];
    for (int64_t i = 1; i < kLast; ++i) sum += last[i];
    sums.push_back(sum);
  }
  return sums;
}

std::vector<double> to_doubles(const Matrix& x) {
  return {x.values.begin(), x.values.end()};
}

// b is turned by panels of a tile's columns, whose last one has sums that nobody reads; a tile's missing rows repeat its last one.
std::vector<double> matmul(std::span<const double> a, std::span<const double> b, size_t m, size_t n,
                           size_t k) {
  static auto* const sum = fastest_sum_tile();
  std::vector<double> d(m * n);
  std::vector<double> panel(kTileColumns * k);
  TileSums sums;
  for (size_t j0 = 0; j0 < n; j0 += kTileColumns) {
    const size_t columns = std::min(kTileColumns, n - j0);
    for (size_t j = 0; j < columns; ++j) {
      for (size_t p = 0; p < k; ++p) panel[p * kTileColumns + j] = b[(j0 + j) * k + p];
    }
    for (size_t i0 = 0; i0 < m; i0 += kTileRows) {
      const size_t rows = std::min(kTileRows, m - i0);
      TileRows row;
      for (size_t i = 0; i < kTileRows; ++i) row[i] = a.data() + (i0 + std::min(i, rows - 1)) * k;
      sum(row, panel.data(), k, sums);
      for (size_t i = 0; i < rows; ++i) {
        std::copy_n(sums[i].begin(), columns,
                    d.begin() + static_cast<ptrdiff_t>((i0 + i) * n + j0));
      }
    }
  }
  return d;
}

std::vector<double> matmul(const Fp8Matrix& a, const Fp8Matrix& b) {
  return matmul(dequantize(a), dequantize(b), static_cast<size_t>(a.rows),
                static_cast<size_t>(b.rows), static_cast<size_t>(a.cols));
}

std::vector<double> matmul(const Matrix& a, const Matrix& b) {
  return matmul(to_doubles(a), to_doubles(b), static_cast<size_t>(a.rows),
                static_cast<size_t>(b.rows), static_cast<size_t>(a.cols));
}

Result<std::vector<double>> linear_gemm(const Recipe& recipe, Gemm gemm, const Matrix& x,
                                        const Matrix& w, const Matrix& dy,
                                        const DelayedAmax& delayed, NonFinite non_finite) {
  F8_TRY(recipe.validate());
  F8_TRY(check_matrix("x", x, x.rows, x.cols));
  F8_TRY(check_matrix("w", w, w.rows, x.cols));
  if (gemm != Gemm::kOutput) F8_TRY(check_matrix("dy", dy, x.rows, w.rows));
  const bool output = gemm == Gemm::kOutput;
  const bool grad_weight = gemm == Gemm::kGradWeight;
  const Operand a = output ? Operand{x, false, delayed.x} : Operand{dy, grad_weight, delayed.dy};
  const Operand b = grad_weight ? Operand{x, true, delayed.x} : Operand{w, !output, delayed.w};
  const Matrix a_matrix = a.transposed ? transpose(a.matrix) : a.matrix;
  const Matrix b_matrix = b.transposed ? transpose(b.matrix) : b.matrix;
  const GemmSetting& setting = recipe.at(gemm);
  if (!setting.is_fp8()) return matmul(a_matrix, b_matrix);
  return matmul(cast_operand(a_matrix, setting.a, a, non_finite),
                cast_operand(b_matrix, setting.b, b, non_finite));
}

Result<LinearResult> linear(const Recipe& recipe, const Matrix& x, const Matrix& w,
                            const Matrix& dy, const DelayedAmax& delayed, NonFinite non_finite) {
  LinearResult result;
  result.y = F8_TRY(linear_gemm(recipe, Gemm::kOutput, x, w, dy, delayed, non_finite));
  result.dx = F8_TRY(linear_gemm(recipe, Gemm::kGradInput, x, w, dy, delayed, non_finite));
  result.dw = F8_TRY(linear_gemm(recipe, Gemm::kGradWeight, x, w, dy, delayed, non_finite));
  return result;
}

double relative_error(std::span<const double> reference, std::span<const double> x) {
  if (reference.size() != x.size()) return std::numeric_limits<double>::quiet_NaN();
  double signal = 0;
  double noise = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    signal += reference[i] * reference[i];
    noise += (reference[i] - x[i]) * (reference[i] - x[i]);
  }
  return noise == 0 ? 0.0 : std::sqrt(noise / signal);
}

double sqnr_db(std::span<const double> reference, std::span<const double> x) {
  return -20.0 * std::log10(relative_error(reference, x));
}

// A test draws the same matrices for one case after the other, and a draw takes longer than what most
// do with it: the values of the last seeds are kept.
Matrix random_matrix(int64_t rows, int64_t cols, uint64_t seed, Distribution distribution) {
  constexpr size_t kMostKept = size_t{1} << 22;
  thread_local std::map<std::pair<uint64_t, Distribution>, std::vector<float>> kept;
  thread_local size_t total = 0;
  const auto size = static_cast<size_t>(rows * cols);
  if (total + size > kMostKept) {
    kept.clear();
    total = 0;
  }
  std::vector<float>& values = kept[{seed, distribution}];
  const uint64_t stream = mix(seed);
  const size_t before = values.size();
  if (before < size) {
    values.resize(size);
    total += size - before;
  }
  for (size_t i = before; i < size; ++i) {
    const double value = draw(stream + i, distribution);
    values[i] = decode_bf16(encode_bf16(static_cast<float>(value)));
  }
  return {rows, cols, {values.begin(), values.begin() + static_cast<ptrdiff_t>(size)}};
}

Matrix rounded_to(const Matrix& x, Dtype type) {
  Matrix rounded{x.rows, x.cols, x.values};
  for (float& value : rounded.values) value = round_element(value, type);
  return rounded;
}

std::vector<uint8_t> to_bytes(const Matrix& x, Dtype type, int64_t ld, uint8_t fill) {
  const int64_t stride = ld == 0 ? x.cols : ld;
  std::vector<uint8_t> bytes(static_cast<size_t>(x.rows * stride) * size_bytes(type), fill);
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) {
      store_element(bytes.data(), r * stride + c, x.at(r, c), type);
    }
  }
  return bytes;
}

std::vector<uint16_t> to_bf16_bits(const Matrix& x) {
  std::vector<uint16_t> bits(x.values.size());
  std::ranges::transform(x.values, bits.begin(), encode_bf16);
  return bits;
}

Matrix from_bf16_bits(int64_t rows, int64_t cols, std::span<const uint16_t> bits) {
  Matrix x{rows, cols, std::vector<float>(bits.size())};
  std::ranges::transform(bits, x.values.begin(), decode_bf16);
  return x;
}

}  // namespace f8::reference
