// Casts of groups of rows: their specs, the buffers that they write, and their calls.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>

#include "recipes/fp8_layout.hpp"
#include "recipes/reference/reference.hpp"
#include "runtime/experts/group_cast.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {

class GroupCasts : public GpuTestWith<const char*> {
 public:
  static std::string spec_name(const ::testing::TestParamInfo<const char*>& suite) {
    std::string name = suite.param;
    std::ranges::replace_if(
        name, [](char c) { return std::isalnum(c) == 0; }, '_');
    return name;
  }

 protected:
  using Matrix = reference::Matrix;
  using AmaxOver = reference::AmaxOver;
  // The casts of 16-bit elements are one launch with average groups of so few rows, and two with so many.
  static constexpr int64_t kSmallGroups = 128, kLargeGroups = int64_t{1} << 20;

  static codegen::CastSpec spec_of(const char* key) {
    return std::get<codegen::CastSpec>(codegen::parse_kernel_spec(key).value());
  }

  static AmaxOver over_of(codegen::ScaleMode mode) {
    switch (mode) {
      case codegen::ScaleMode::kTensor:
        return AmaxOver::kTensor;
      case codegen::ScaleMode::kBlock1x128:
        return AmaxOver::kBlock1x128;
      case codegen::ScaleMode::kBlock128x128:
        return AmaxOver::kBlock128x128;
      default:
        return AmaxOver::kRow;
    }
  }
  static Matrix rows_of(const Matrix& x, int64_t first, int64_t count) {
    Matrix out{count, x.cols, {}};
    const auto from = x.values.begin() + first * x.cols;
    out.values.assign(from, from + count * x.cols);
    return out;
  }

  // The buffers of a cast of `groups` groups, whose qt has rows of `columns`.
  struct Copies {
    Copies(const Context& context, const GroupCastPlan& plan, int64_t rows, int64_t cols,
           int64_t groups, int64_t qt_rows, int64_t columns)
        : q(context, fp8_copy_bytes(rows, cols)),
          qt(context, fp8_copy_bytes(qt_rows, columns)),
          scale(context, static_cast<size_t>(groups * kernels::kScaleStride) * sizeof(float)),
          // At least what scales of axes and of either block take.
          inv_row(context,
                  static_cast<size_t>(ceil_div(cols, 128) * scale_rows_of_groups(rows, groups)) *
                      sizeof(float)),
          inv_col(context,
                  static_cast<size_t>((groups + columns / 128) * kernels::padded_scales(cols)) *
                      sizeof(float)),
          words(context, plan.words(rows, groups) * sizeof(uint32_t)) {}
    DeviceBuffer q, qt, scale, inv_row, inv_col, words;

    [[nodiscard]] bool guards_are_whole() const {
      return q.guards_are_whole() && qt.guards_are_whole() && scale.guards_are_whole() &&
             inv_row.guards_are_whole() && inv_col.guards_are_whole() && words.guards_are_whole();
    }
  };
  static GroupCastCall call_of(const kernels::GroupsOf& groups, int64_t rows, const Copies& to) {
    return {.groups = groups,
            .rows = rows,
            .words = to.words.as<uint32_t>(),
            .q = to.q.as<uint8_t>(),
            .qt = to.qt.as<uint8_t>(),
            .scale = to.scale.as<float>(),
            .inv_row = to.inv_row.as<float>(),
            .inv_col = to.inv_col.as<float>()};
  }
};

}  // namespace f8::runtime::gpu
