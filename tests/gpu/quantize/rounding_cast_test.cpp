// Kernels that round fp32 as they read it, against the kernels that read what the CPU rounded: every
// byte that they leave is the same. The latter are compared with the reference elsewhere.
#include <algorithm>
#include <memory>

#include "recipes/fp8_layout.hpp"
#include "runtime/quantize/quantize_list.hpp"
#include "tests/gpu/gpu_test.hpp"
#include "tests/gpu/quantize/quantize_data.hpp"

namespace f8::runtime::gpu {
namespace {

using codegen::CastSpec;
using reference::Matrix;

constexpr int64_t kGap = 16;  // elements between rows

struct Size {
  int64_t rows, cols;
};
// Tails of tiles, single rows, and rows that cut a tile of 128 columns.
const std::vector<Size> kSizes = {{1, 16}, {129, 272}, {300, 144}, {17, 48}, {200, 16}};

size_t floats(codegen::ScaleMode mode, int64_t rows, int64_t cols) {
  return static_cast<size_t>(scale_floats(mode, rows, cols)) * sizeof(float);
}

// A matrix in a type, and everything that amax and cast kernels write of it.
struct RoundedOnDevice {
  RoundedOnDevice(const Context& context, const CastSpec& spec, const Matrix& x)
      : input(context, reference::to_bytes(x, codegen::memory_type(spec), x.cols + kGap, kPoison)),
        words(context, std::vector<uint32_t>(static_cast<size_t>(2 + x.rows + x.cols) +
                                             static_cast<size_t>(cast_tiles(x.rows, x.cols)))),
        delayed(context, std::vector<float>{24.0F}),
        q(context, static_cast<size_t>(x.rows * row_pitch(x.cols))),
        qt(context, static_cast<size_t>(x.cols * row_pitch(x.rows))),
        scale(context, (kernels::kInverse + 1) * sizeof(float)),
        inv_row(context, floats(spec.scale_q, x.rows, x.cols)),
        inv_col(context, floats(spec.scale_qt, x.cols, x.rows)),
        counters(context, std::vector<uint64_t>(2 * sizeof(kernels::CastCounters) / 8)),
        operand{.x = input.as(),
                .rows = x.rows,
                .cols = x.cols,
                .ld = x.cols + kGap,
                .partials = words.as<uint32_t>() + 1,
                .row_amax = words.as<uint32_t>() + 2,
                .col_amax = words.as<uint32_t>() + 2 + x.rows,
                .q = q.as<uint8_t>(),
                .qt = qt.as<uint8_t>(),
                .scale = scale.as<float>(),
                .inv_row = inv_row.as<float>(),
                .inv_col = inv_col.as<float>(),
                .delayed = delayed.as<float>(),
                .recorded_amax = words.as<uint32_t>(),
                .counters = spec.count ? counters.as<kernels::CastCounters>() : nullptr,
                .block_amax = words.as<uint32_t>() + 2 + x.rows + x.cols,
                .first_row = 0,
                .whole_rows = x.rows} {}

  DeviceBuffer input, words, delayed, q, qt, scale, inv_row, inv_col, counters;
  QuantizeOperand operand;
};

using Devices = std::vector<std::unique_ptr<RoundedOnDevice>>;

class RoundingCastTest : public GpuTestWith<const char*> {
 protected:
  [[nodiscard]] static CastSpec spec() {
    return std::get<CastSpec>(codegen::parse_kernel_spec(GetParam()).value());
  }

  // Casts the matrices by a list; with given_maxima in two halves.
  void run(const CastSpec& spec, const std::vector<Matrix>& matrices, const ListOptions& options,
           Devices& devices) {
    std::vector<MatrixSize> sizes;
    std::vector<QuantizeOperand> operands;
    for (const Matrix& x : matrices) {
      devices.push_back(std::make_unique<RoundedOnDevice>(context(), spec, x));
      operands.push_back(devices.back()->operand);
      sizes.push_back({x.rows, x.cols});
    }
    const auto list = QuantizeList::plan(context_, spec, sizes, options);
    F8_ASSERT_OK(list);
    if (options.given_maxima) {
      F8_ASSERT_OK(list->find(operands, nullptr));
      F8_ASSERT_OK(list->cast(operands, nullptr));
      return;
    }
    const DeviceBuffer workspace(context(), std::max<size_t>(list->workspace_bytes(), 16));
    F8_ASSERT_OK(list->run(operands, workspace.as(), nullptr));
    EXPECT_TRUE(workspace.guards_are_whole());
  }

  void expect_the_same(const ListOptions& options, size_t count) {
    const CastSpec rounding = spec();
    CastSpec plain = rounding;
    plain.from_f32 = false;
    for (const Floats kind : kAllFloats) {
      std::vector<Matrix> matrices;
      std::vector<Matrix> rounded;
      for (size_t i = 0; i < count; ++i) {
        const auto [rows, cols] = kSizes[i % kSizes.size()];
        matrices.push_back(random_floats(kind, rows, cols, i));
        rounded.push_back(reference::rounded_to(matrices.back(), rounding.in));
      }
      Devices found;
      Devices expected;
      run(rounding, matrices, options, found);
      run(plain, rounded, options, expected);
      if (HasFailure()) return;
      for (size_t i = 0; i < count; ++i) {
        for (const auto& [buffer, what] : {std::pair{&RoundedOnDevice::words, "words"},
                                           {&RoundedOnDevice::q, "q"},
                                           {&RoundedOnDevice::qt, "qt"},
                                           {&RoundedOnDevice::scale, "scale"},
                                           {&RoundedOnDevice::inv_row, "inv_row"},
                                           {&RoundedOnDevice::inv_col, "inv_col"},
                                           {&RoundedOnDevice::counters, "counters"}}) {
          const DeviceBuffer& got = (*found[i]).*buffer;
          ASSERT_TRUE(got.download<uint8_t>() == ((*expected[i]).*buffer).download<uint8_t>())
              << what << " of matrix " << i << ", floats " << static_cast<int>(kind);
          ASSERT_TRUE(got.guards_are_whole()) << what << " of matrix " << i;
        }
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Specs, RoundingCastTest,
    ::testing::Values(
        "cast/bf16.e4m3/tensor/q+qt/from_f32", "cast/f16.e4m3/tensor/q+qt/from_f32/hold",
        "cast/bf16.e4m3/tensor/q/from_f32/hold", "cast/bf16.e5m2/delayed/q+qt/from_f32",
        "cast/f16.e4m3/delayed/q+qt/from_f32/count", "cast/bf16.e4m3/axis/q+qt/from_f32/pow2/hold",
        "cast/f16.e4m3/axis/q/from_f32", "cast/bf16.e4m3/axis/qt/from_f32",
        "cast/bf16.e4m3/axis+tensor/q+qt/from_f32/pow2",
        "cast/bf16.e4m3/block1x128/q+qt/from_f32/hold",
        "cast/f16.e4m3/block128x128/q+qt/from_f32/pow2/hold",
        "cast/bf16.e4m3/block128x128/q+qt/from_f32/pow2/hold/shard",
        "cast/f16.e4m3/block128x128/qt/from_f32/shard"),
    [](const auto& suite) {
      std::string name = suite.param;
      std::ranges::replace_if(
          name, [](char c) { return std::isalnum(c) == 0; }, '_');
      return name;
    });

TEST_P(RoundingCastTest, LeavesWhatARoundedMatrixLeaves) {
  std::vector<ListOptions> all;
  if (!spec().shard) all = {{}, {.tile_amax = true}};          // a shard's maxima are always given
  if (!spec().delayed) all.push_back({.given_maxima = true});  // delayed scales need none
  for (const ListOptions& options : all) {
    for (const size_t count : {1, 2, 30}) {
      SCOPED_TRACE(f8::format("{} matrices, tile_amax: {}, given_maxima: {}", count,
                              options.tile_amax, options.given_maxima));
      expect_the_same(options, count);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
