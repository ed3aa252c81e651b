// The layout of an fp8 copy in memory: rows that are contiguous along K and padded with zeros, each
// of them at the beginning of a line of L2.
#pragma once

#include <cstddef>
#include <cstdint>

namespace f8 {

[[nodiscard]] constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// The K of an fp8 copy's rows as cuBLASLt takes it: the rows hold zeros up to there.
[[nodiscard]] constexpr int64_t padded(int64_t extent) {
  return ceil_div(extent, 16) * 16;
}
// The bytes from one row of an fp8 copy to the next. They are whole lines of L2: the GEMMs read 128
// bytes of each row at a time and take up to 1.6 times as long if those are two lines
// (docs/kernels.md).
[[nodiscard]] constexpr int64_t row_pitch(int64_t extent) {
  return ceil_div(extent, 128) * 128;
}
// The bytes of an fp8 copy with `rows` rows of `extent` elements.
[[nodiscard]] constexpr size_t fp8_copy_bytes(int64_t rows, int64_t extent) {
  return static_cast<size_t>(rows * row_pitch(extent));
}

}  // namespace f8
