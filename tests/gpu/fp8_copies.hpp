// The bytes of a tensor's fp8 copies on the device.
#pragma once

#include <vector>

#include "runtime/device/context_state.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "runtime/quantize/quantize.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {

// Reads one copy of a view: its rows, without what lies between them, and its scales.
inline std::vector<std::vector<uint8_t>> copy_bytes(Context& context, const void* data,
                                                    const float* inverse, int64_t rows,
                                                    int64_t cols, int64_t ld, int64_t scales) {
  const Driver& driver = context.state().driver;
  const auto read = [&](const void* from, size_t bytes) {
    std::vector<uint8_t> to(bytes);
    EXPECT_EQ(driver.memcpy_dtoh(to.data(), reinterpret_cast<CUdeviceptr>(from), bytes),
              CUDA_SUCCESS);
    return to;
  };
  EXPECT_EQ(driver.ctx_synchronize(), CUDA_SUCCESS);
  std::vector<std::vector<uint8_t>> out;
  const std::vector<uint8_t> all = read(data, static_cast<size_t>(rows * ld));
  for (int64_t r = 0; r < rows; ++r) {
    const auto row = all.begin() + r * ld;
    out.emplace_back(row, row + cols);
  }
  out.push_back(read(inverse, static_cast<size_t>(scales) * sizeof(float)));
  return out;
}

// Reads both copies of a view with all of their scales, which of a shard may be those of the whole.
inline std::vector<std::vector<uint8_t>> copies(Context& context, const float8_tensor& view) {
  std::vector<std::vector<uint8_t>> out;
  const auto add = [&](const void* data, const float* inverse, int64_t rows, int64_t cols,
                       int64_t ld, const float8_cast_setting& setting, int64_t scale_rows,
                       int64_t scale_cols) {
    if (data == nullptr || rows == 0 || cols == 0) return;
    const auto mode = static_cast<Granularity>(setting.granularity);
    const int64_t scales =
        mode == codegen::ScaleMode::kTensor ? 1 : scale_floats(mode, scale_rows, scale_cols);
    const auto copy = copy_bytes(context, data, inverse, rows, cols, ld, scales);
    out.insert(out.end(), copy.begin(), copy.end());
  };
  const int64_t of_whole = view.whole_rows != 0 ? view.whole_rows : view.rows;
  add(view.q, view.q_inverse_scale, view.rows, view.cols, view.ld_q, view.q_setting, of_whole,
      view.cols);
  add(view.qt, view.qt_inverse_scale, view.cols, view.rows, view.ld_qt, view.qt_setting, view.cols,
      of_whole);
  return out;
}

}  // namespace f8::runtime::gpu
