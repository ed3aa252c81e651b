#include "runtime/emulation/column_sums.hpp"

#include <algorithm>
#include <array>

#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

constexpr int64_t kGroup = 8;  // the rows that are added up first
constexpr int64_t kWarps = 8;  // the chains of sums of a bias gradient

}  // namespace

void sum_columns(const reference::Matrix& x, float* sums) {
  for (int64_t row0 = 0; row0 < x.rows; row0 += kernels::kCastTile, sums += x.cols) {
    for (int64_t c = 0; c < x.cols; ++c) {
      const auto group = [&](int64_t first) {
        const auto value = [&](int64_t r) { return r < x.rows ? x.at(r, c) : 0.0F; };
        float sum = value(first);
        for (int64_t i = 1; i < kGroup; ++i) sum += value(first + i);
        return sum;
      };
      sums[c] = group(row0);
      for (int64_t i = kGroup; i < kernels::kCastTile; i += kGroup) sums[c] += group(row0 + i);
    }
  }
}

void emulate(const codegen::ColumnSumsSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::ColumnSumsArgs>();
  const unsigned grid = call.launch.grid;
  const unsigned tiles = cast_tiles(args.rows, args.cols);
  if (grid != tiles) call.fault("column sums: grid {} for {} tiles", grid, tiles);
  if (args.x == nullptr || !is_aligned(args.x) || args.sums == nullptr) {
    call.fault("column sums: x or sums misaligned or null");
  }
  if (args.ld < args.cols || !is_row_stride(args.ld, args.cols, spec.in) || args.cols % 8 != 0) {
    call.fault("column sums: ld {} cols {}", args.ld, args.cols);
  }
  if (!call.faults.empty()) return;
  reference::Matrix x{args.rows, args.cols, {}};
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) {
      x.values.push_back(load_element(args.x, r * args.ld + c, spec.in));
    }
  }
  sum_columns(x, args.sums);
}

void emulate(const codegen::BiasGradSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::BiasGradArgs>();
  const unsigned grid = call.launch.grid;
  if (grid != ceil_div(args.cols, kernels::kBiasColumns)) {
    call.fault("bias gradient: grid {} for {} columns", grid, args.cols);
  }
  if (args.sums == nullptr || args.out == nullptr) {
    call.fault("bias gradient: sums or out is null");
  }
  if (!call.faults.empty()) return;
  for (int64_t c = 0; c < args.cols; ++c) {
    std::array<float, kWarps> chains{};
    for (int64_t i = 0; i < args.count; ++i) {
      chains[static_cast<size_t>(i % kWarps)] += args.sums[i * args.cols + c];
    }
    float sum = chains[0];
    for (size_t i = 1; i < chains.size(); ++i) sum += chains[i];
    if (args.add != 0) sum += load_element(args.out, c, spec.out);
    store_element(args.out, c, sum, spec.out);
  }
}

}  // namespace f8::runtime::emulation
