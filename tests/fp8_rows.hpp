// An fp8 matrix as a GEMM reads it: rows a pitch apart, zeros between them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "recipes/fp8_layout.hpp"
#include "recipes/reference/reference.hpp"

namespace f8 {

[[nodiscard]] inline std::vector<uint8_t> fp8_rows(const reference::Fp8Matrix& x) {
  std::vector<uint8_t> out(fp8_copy_bytes(x.rows, x.cols));
  for (int64_t r = 0; r < x.rows; ++r) {
    std::copy_n(&x.bits[static_cast<size_t>(r * x.cols)], x.cols,
                &out[static_cast<size_t>(r * row_pitch(x.cols))]);
  }
  return out;
}

}  // namespace f8
