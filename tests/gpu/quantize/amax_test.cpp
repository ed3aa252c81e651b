// The amax kernels against the reference, bit for bit.
#include <algorithm>
#include <bit>

#include "runtime/gemm/gemm.hpp"
#include "runtime/quantize/quantize.hpp"
#include "tests/gpu/gpu_test.hpp"
#include "tests/gpu/quantize/quantize_data.hpp"

namespace f8::runtime::gpu {
namespace {

using reference::AmaxOver;

std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> out(values.size());
  std::ranges::transform(values, out.begin(), [](float v) { return std::bit_cast<uint32_t>(v); });
  return out;
}

// The amaxes of the matrix's rows or columns, from the per-tile partials (tile_amax.cuh).
std::vector<uint32_t> combined(const std::vector<uint16_t>& tile_amax, int64_t rows, int64_t cols,
                               bool columns) {
  std::vector<uint32_t> most(static_cast<size_t>(columns ? cols : rows));
  const int64_t across = ceil_div(cols, kernels::kCastTile);
  const int64_t down = ceil_div(rows, kernels::kCastTile);
  for (int64_t tile = 0; tile < across * down; ++tile) {
    const int64_t first = (columns ? tile % across : tile / across) * kernels::kCastTile;
    for (int64_t i = 0; i < kernels::kCastTile; ++i) {
      const auto at = tile * kernels::kTileAmaxSize + (columns ? kernels::kCastTile : 0) + i;
      const uint32_t bits = uint32_t{tile_amax[static_cast<size_t>(at)]} << 16;
      const auto index = static_cast<size_t>(first + i);
      if (index < most.size()) {
        most[index] = std::max(most[index], bits);
      } else {
        EXPECT_EQ(bits, 0U) << "beyond the matrix";
      }
    }
  }
  return most;
}

class AmaxTest : public GpuTestWith<const char*> {};
INSTANTIATE_TEST_SUITE_P(Over, AmaxTest,
                         ::testing::Values("tensor", "row", "col", "rowcol", "row+tensor",
                                           "col+tensor", "rowcol+tensor"),
                         [](const auto& suite) {
                           std::string name = suite.param;
                           std::ranges::replace(name, '+', '_');
                           return name;
                         });

TEST_P(AmaxTest, BitwiseLikeTheReference) {
  const std::string key = f8::format("amax/bf16/{}", GetParam());
  const auto spec = std::get<codegen::AmaxSpec>(codegen::parse_kernel_spec(key).value());
  const auto kernel = context().kernel(spec);
  F8_ASSERT_OK(kernel);
  for (const int64_t rows : {1, 17, 1000, 4095}) {
    for (const int64_t cols : {16, 48, 2064}) {
      for (const Data data : {Data::kOutliers, Data::kTiny, Data::kNonFinite, Data::kHuge}) {
        const uint64_t seed = static_cast<uint64_t>(rows * 10000 + cols);
        SCOPED_TRACE(f8::format("{} rows {} cols {} data {} seed {}", key, rows, cols,
                                static_cast<int>(data), seed));
        const auto x = make_data(data, rows, cols, seed);
        const auto dx = to_device(context(), x);
        const int32_t count = amax_partials(rows, cols, context().device().sm_count);
        const DeviceBuffer partials(context(), std::vector<uint32_t>(static_cast<size_t>(count)));
        const DeviceBuffer row(context(), std::vector<uint32_t>(static_cast<size_t>(rows)));
        const DeviceBuffer col(context(), std::vector<uint32_t>(static_cast<size_t>(cols)));
        const QuantizeOperand operand{.x = dx.as(),
                                      .rows = rows,
                                      .cols = cols,
                                      .partials = partials.as<uint32_t>(),
                                      .row_amax = row.as<uint32_t>(),
                                      .col_amax = col.as<uint32_t>()};
        const auto args = amax_args(spec, context().device().sm_count, {&operand, 1});
        F8_ASSERT_OK(launch_amax(driver(), **kernel, args, true, nullptr));
        if (spec.tensor) {
          const auto words = partials.download<uint32_t>();
          EXPECT_EQ(*std::ranges::max_element(words),
                    bits(reference::amax(x, AmaxOver::kTensor))[0]);
        }
        if (spec.row) {
          EXPECT_EQ(row.download<uint32_t>(), bits(reference::amax(x, AmaxOver::kRow)));
        }
        if (spec.col) {
          EXPECT_EQ(col.download<uint32_t>(), bits(reference::amax(x, AmaxOver::kColumn)));
        }
        for (const DeviceBuffer* buffer : {&partials, &row, &col}) {
          EXPECT_TRUE(buffer->guards_are_whole());
        }
        if (fits_tile_amax(spec, rows, cols)) {
          const DeviceBuffer tile_amax(context(), tile_amax_bytes(spec, rows, cols));
          QuantizeOperand by_tile_amax{.x = dx.as(), .rows = rows, .cols = cols};
          by_tile_amax.tile_amax = tile_amax.as<uint16_t>();
          const auto tile_amax_args =
              amax_args(spec, context().device().sm_count, {&by_tile_amax, 1});
          F8_ASSERT_OK(launch_amax(driver(), **kernel, tile_amax_args, true, nullptr));
          const auto left = tile_amax.download<uint16_t>();
          if (spec.row) {
            EXPECT_EQ(combined(left, rows, cols, false), row.download<uint32_t>());
          }
          if (spec.col) {
            EXPECT_EQ(combined(left, rows, cols, true), col.download<uint32_t>());
          }
          EXPECT_TRUE(tile_amax.guards_are_whole());
        }
        if (HasFailure()) return;
      }
    }
  }
}

// Two matrices of different sizes in one launch, with row strides above their width.
TEST_P(AmaxTest, SeveralStridedMatricesInOneLaunch) {
  const std::string key = f8::format("amax/bf16/{}", GetParam());
  const auto spec = std::get<codegen::AmaxSpec>(codegen::parse_kernel_spec(key).value());
  const auto kernel = context().kernel(spec);
  F8_ASSERT_OK(kernel);
  struct One {
    One(Context& context, int64_t rows, int64_t cols, int64_t ld, uint64_t seed)
        : x(make_data(Data::kOutliers, rows, cols, seed)),
          row(context, std::vector<uint32_t>(static_cast<size_t>(rows))),
          col(context, std::vector<uint32_t>(static_cast<size_t>(cols))),
          partials(context,
                   std::vector<uint32_t>(static_cast<size_t>(amax_partials(rows, cols, 1000)))) {
      std::vector<uint16_t> strided(static_cast<size_t>(rows * ld), 0x7fc0);  // NaN between rows
      const auto dense = reference::to_bf16_bits(x);
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(&dense[static_cast<size_t>(r * cols)], cols,
                    &strided[static_cast<size_t>(r * ld)]);
      }
      device = std::make_unique<DeviceBuffer>(context, strided);
      operand = {.x = device->as(),
                 .rows = rows,
                 .cols = cols,
                 .partials = partials.as<uint32_t>(),
                 .row_amax = row.as<uint32_t>(),
                 .col_amax = col.as<uint32_t>()};
    }
    reference::Matrix x;
    DeviceBuffer row, col, partials;
    std::unique_ptr<DeviceBuffer> device;
    QuantizeOperand operand;
  };
  const One first(context(), 300, 144, 160, 1);
  const One second(context(), 129, 272, 288, 2);
  const QuantizeOperand operands[] = {first.operand, second.operand};
  auto args = amax_args(spec, context().device().sm_count, operands);
  args.tensors[0].ld = 160;
  args.tensors[1].ld = 288;
  F8_ASSERT_OK(launch_amax(driver(), **kernel, args, true, nullptr));
  for (const One* one : {&first, &second}) {
    SCOPED_TRACE(f8::format("{} matrix {}", key, one == &first ? 0 : 1));
    if (spec.tensor) {
      const auto words = one->partials.download<uint32_t>();
      EXPECT_EQ(*std::ranges::max_element(words),
                bits(reference::amax(one->x, AmaxOver::kTensor))[0]);
    }
    if (spec.row) {
      EXPECT_EQ(one->row.download<uint32_t>(), bits(reference::amax(one->x, AmaxOver::kRow)));
    }
    if (spec.col) {
      EXPECT_EQ(one->col.download<uint32_t>(), bits(reference::amax(one->x, AmaxOver::kColumn)));
    }
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
