// The K-grouped GEMM gives for each group, bit for bit, what the dense GEMM of the same configuration
// gives for the group's columns, zeros for an empty one, and writes nothing else: by configuration,
// scales and routing.
#include "runtime/gemm/k_grouped.hpp"

#include <cmath>
#include <random>

#include "recipes/reference/groups.hpp"
#include "runtime/experts/group_layout.hpp"
#include "tests/gpu/experts/random_operands.hpp"
#include "tests/gpu/experts/routings.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

using codegen::ScaleMode;

struct KGroupedCase {
  const char* config;
  ScaleMode scale;
  bool fast;
  Dtype d = Dtype::kBf16;
  bool add = false;
};

class KGroupedTest : public GpuTestWith<KGroupedCase> {
 protected:
  // An operand [rows][columns of all groups]: NaN where no group has a block, zeros behind a group's own
  // columns.
  struct Operand {
    Operand(const Context& context, int64_t of_rows, int64_t of_columns,
            const reference::Groups& groups, uint64_t seed)
        : rows(of_rows),
          columns(of_columns),
          bytes(static_cast<size_t>(rows * columns), kPoison),
          scale_stride(kernels::padded_scales(rows)) {
      const std::vector<uint8_t> random = random_fp8(bytes.size(), seed);
      for (size_t e = 0; e < groups.lengths.size(); ++e) {
        const int64_t first = int64_t{groups.blocks[e]} * kernels::kCastTile;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < row_pitch(groups.lengths[e]); ++c) {
            const auto at = static_cast<size_t>(r * columns + first + c);
            bytes[at] = c < groups.lengths[e] ? random[at] : 0;
          }
        }
      }
      device = std::make_unique<DeviceBuffer>(context, bytes);
      const auto scales =
          static_cast<size_t>(std::max(static_cast<int64_t>(groups.lengths.size()) *
                                           std::max<int64_t>(rows, kernels::kScaleStride),
                                       columns / kernels::kCastTile * scale_stride));
      inverse = std::make_unique<DeviceBuffer>(context, random_scales(scales, seed + 1));
    }
    // A group's columns as a matrix of their own.
    [[nodiscard]] std::vector<uint8_t> of_group(const reference::Groups& groups, size_t e) const {
      const int64_t pitch = row_pitch(groups.lengths[e]);
      std::vector<uint8_t> own;
      for (int64_t r = 0; r < rows; ++r) {
        const auto from =
            bytes.begin() + r * columns + int64_t{groups.blocks[e]} * kernels::kCastTile;
        own.insert(own.end(), from, from + pitch);
      }
      return own;
    }
    [[nodiscard]] const float* scales_of(const reference::Groups& groups, size_t e,
                                         ScaleMode mode) const {
      const auto group = static_cast<int64_t>(e);
      return inverse->as<float>() + (is_block(mode)             ? groups.blocks[e] * scale_stride
                                     : mode == ScaleMode::kAxis ? group * rows
                                                                : group * kernels::kScaleStride);
    }

    int64_t rows, columns;
    std::vector<uint8_t> bytes;
    int64_t scale_stride;
    std::unique_ptr<DeviceBuffer> device, inverse;
  };

  void check(const Routing& routing, int64_t n, int64_t k) {
    const auto& [config, scale, fast, d_type, add] = GetParam();
    const auto experts = static_cast<int64_t>(routing.ends.size());
    const Shape linear{std::max(routing.m, 1), n, k};
    const GemmDesc desc{.gemm = Gemm::kGradWeight,
                        .shape = linear,
                        .d = d_type,
                        .scale = scale,
                        .fast = fast,
                        .add = add};
    const reference::Groups groups = reference::groups(routing.ends, routing.m);
    const int64_t columns = columns_of_groups(linear.m, experts);
    const Operand a(context(), n, columns, groups, 1);
    const Operand b(context(), k, columns, groups, 5);
    const size_t matrix = static_cast<size_t>(n * k) * size_bytes(d_type);
    const std::vector<uint8_t> before(matrix * static_cast<size_t>(experts), add ? 0x3f : kPoison);
    const DeviceBuffer alone(context(), before), together(context(), before);
    const auto dense = GemmPlan::create(
        context_, desc, GemmChoice{parse_gemm_kernel(Provider::kGenerated, config).value()});
    F8_ASSERT_OK(dense);
    for (size_t e = 0; e < routing.ends.size(); ++e) {
      const DeviceBuffer own_a(context(), a.of_group(groups, e));
      const DeviceBuffer own_b(context(), b.of_group(groups, e));
      GemmCall call;
      call.a = own_a.as();
      call.b = own_b.as();
      call.d = alone.as<uint8_t>() + e * matrix;
      call.inv_scale_a = a.scales_of(groups, e, scale);
      call.inv_scale_b = b.scales_of(groups, e, scale);
      call.m = groups.lengths[e];
      F8_ASSERT_OK((*dense)->run(call, nullptr, nullptr));
      F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
    }
    const auto layouts = GroupLayoutPlan::create(context_, linear.m, experts);
    F8_ASSERT_OK(layouts);
    const DeviceBuffer layout(context(), std::vector<uint8_t>(layouts->bytes()));
    const DeviceBuffer offsets(context(), routing.ends);
    const auto grouped = KGroupedGemm::create(
        context_, {.gemm = desc, .layout = group_layout_of(linear.m, experts).value()},
        parse_gemm_config(config).value());
    F8_ASSERT_OK(grouped);
    // The layout and the GEMM follow each other without a wait, as in a step.
    F8_ASSERT_OK(layouts->run(
        {.offsets = offsets.as<int32_t>(), .m = routing.m, .layout = {layout.as()}}, nullptr));
    F8_ASSERT_OK(grouped->run({.a = a.device->as(),
                               .b = b.device->as(),
                               .d = together.as(),
                               .inv_scale_a = a.inverse->as<float>(),
                               .inv_scale_b = b.inverse->as<float>(),
                               .layout = layout.as()},
                              nullptr));
    EXPECT_EQ(together.download<uint8_t>(), alone.download<uint8_t>()) << routing.name;
    EXPECT_TRUE(together.guards_are_whole()) << routing.name;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Configurations, KGroupedTest,
    ::testing::Values(
        KGroupedCase{"128x128s6c1x1w2pg8", ScaleMode::kTensor, true},
        KGroupedCase{"128x128s6c2x1w2pg8", ScaleMode::kAxis, true},
        KGroupedCase{"64x256s4c1x1w2pg16", ScaleMode::kAxis, true, Dtype::kF32},
        KGroupedCase{"128x256s3c1x1w2g16", ScaleMode::kAxis, false},
        KGroupedCase{"128x256s3c1x2w2g16", ScaleMode::kTensor, false},
        KGroupedCase{"256x128s3c2x1w2g4", ScaleMode::kAxis, false, Dtype::kF16},
        KGroupedCase{"192x128s4c1x2w3g16", ScaleMode::kTensor, false, Dtype::kF32, true},
        KGroupedCase{"128x128s5c2x2w2g16", ScaleMode::kAxis, false},
        KGroupedCase{"128x128s5c1x1w2g16", ScaleMode::kAxis, false, Dtype::kBf16, true},
        KGroupedCase{"128x128s5c1x1w2g16", ScaleMode::kBlock1x128, false},
        KGroupedCase{"128x256s3c2x1w2g16", ScaleMode::kBlock1x128, false, Dtype::kF32, true},
        KGroupedCase{"64x64s8c1x1w1g16", ScaleMode::kTensor, true, Dtype::kF32}),
    [](const auto& suite) {
      return f8::format("{}_{}_{}{}{}", suite.param.config, to_string(suite.param.scale),
                        suite.param.fast ? "fast" : "precise", to_string(suite.param.d),
                        suite.param.add ? "_add" : "");
    });

TEST_P(KGroupedTest, IsTheDenseGemmOfEachGroup) {
  for (const Routing& routing : routings(by_device(1024, 40))) {
    // N and K that tiles do not divide, and with many experts small ones.
    const bool small = kEmulated || routing.ends.size() > 100;
    check(routing, small ? 48 : 400, small ? 80 : 528);
    if (HasFailure()) return;
  }
}

struct MnMajorCase {
  const char* config;
  Dtype type;
  Dtype d;
  bool add = false;
};

// Operands in 16 bits, which are integers, so that sums are exact in any order. Rows of every third group
// and of no group are NaN, which no other group sees.
class MnMajorTest : public GpuTestWith<MnMajorCase> {
 protected:
  struct Operand {
    Operand(const Context& context, const Routing& routing, const reference::Groups& groups,
            int64_t of_cols, Dtype type, uint64_t seed)
        : cols(of_cols), ld(cols + 8), values(static_cast<size_t>(routing.m * cols)) {
      std::mt19937_64 random(seed);
      std::uniform_int_distribution<int> integer(-4, 4);
      for (float& value : values) value = static_cast<float>(integer(random));
      const reference::Matrix matrix{1, static_cast<int64_t>(values.size()), values};
      const std::vector<uint8_t> dense = reference::to_bytes(matrix, type);
      std::vector<uint8_t> bytes(static_cast<size_t>(std::max(routing.m, 1) * ld) * 2, kPoison);
      for (size_t e = 0; e < groups.lengths.size(); e += e % 3 == 1 ? 2 : 1) {
        for (int64_t r = groups.starts[e]; r < groups.starts[e] + groups.lengths[e]; ++r) {
          std::copy_n(dense.begin() + r * cols * 2, cols * 2, bytes.begin() + r * ld * 2);
        }
      }
      device = std::make_unique<DeviceBuffer>(context, bytes);
    }
    int64_t cols, ld;
    std::vector<float> values;
    std::unique_ptr<DeviceBuffer> device;
  };

  // Where an expert's matrix has other elements than it should, and the first few of them.
  static std::string differences(const std::vector<uint8_t>& found,
                                 const std::vector<uint8_t>& expected, size_t expert, int64_t n,
                                 int64_t k, Dtype type) {
    std::string text;
    int64_t count = 0;
    for (int64_t i = 0; i < n * k; ++i) {
      const int64_t at = static_cast<int64_t>(expert) * n * k + i;
      const float of_found = load_element(found.data(), at, type);
      const float of_expected = load_element(expected.data(), at, type);
      if (of_found == of_expected) continue;
      if (count++ < 5) {
        text += f8::format("; [{}][{}]: {}, not {}", i / k, i % k, of_found, of_expected);
      }
    }
    return text + f8::format("; {} of {} differ", count, n * k);
  }

  void check(const Routing& routing, int64_t n, int64_t k) {
    const auto& [config, type, d_type, add] = GetParam();
    const auto experts = static_cast<int64_t>(routing.ends.size());
    const Shape linear{std::max(routing.m, 1), n, k};
    const GemmDesc desc{
        .gemm = Gemm::kGradWeight, .shape = linear, .a = type, .b = type, .d = d_type, .add = add};
    const reference::Groups groups = reference::groups(routing.ends, routing.m);
    const Operand a(context(), routing, groups, n, type, 1);
    const Operand b(context(), routing, groups, k, type, 2);
    const std::vector<float> before(static_cast<size_t>(experts * n * k), 3);
    const auto bytes_of = [&, type = d_type](const std::vector<float>& values) {
      return reference::to_bytes(reference::Matrix{experts * n, k, values}, type);
    };
    const DeviceBuffer d(context(), bytes_of(before));
    const auto layouts = GroupLayoutPlan::create(context_, linear.m, experts);
    F8_ASSERT_OK(layouts);
    const DeviceBuffer layout(context(), std::vector<uint8_t>(layouts->bytes()));
    const DeviceBuffer offsets(context(), routing.ends);
    const auto grouped = KGroupedGemm::create(
        context_, {.gemm = desc, .layout = group_layout_of(linear.m, experts).value()},
        parse_gemm_config(config).value());
    F8_ASSERT_OK(grouped);
    F8_ASSERT_OK(layouts->run(
        {.offsets = offsets.as<int32_t>(), .m = routing.m, .layout = {layout.as()}}, nullptr));
    F8_ASSERT_OK(grouped->run({.a = a.device->as(),
                               .b = b.device->as(),
                               .d = d.as(),
                               .layout = layout.as(),
                               .m = linear.m,
                               .ld_a = a.ld,
                               .ld_b = b.ld},
                              nullptr));
    const size_t matrix = static_cast<size_t>(n * k) * size_bytes(d_type);
    const std::vector<uint8_t> found = d.download<uint8_t>();
    std::vector<float> sums(before.size(), add ? 3 : 0);
    for (size_t e = 0; e < groups.lengths.size(); ++e) {
      for (int64_t r = groups.starts[e]; r < groups.starts[e] + groups.lengths[e]; ++r) {
        for (int64_t i = 0; i < n; ++i) {
          const float of_a = a.values[static_cast<size_t>(r * n + i)];
          float* const to =
              &sums[(e * static_cast<size_t>(n) + static_cast<size_t>(i)) * static_cast<size_t>(k)];
          const float* const of_b = &b.values[static_cast<size_t>(r * k)];
          for (int64_t j = 0; j < k; ++j) to[j] += of_a * of_b[j];
        }
      }
    }
    const std::vector<uint8_t> expected = bytes_of(sums);
    for (size_t e = 0; e < groups.lengths.size(); ++e) {
      const auto first = static_cast<std::ptrdiff_t>(e * matrix);
      const auto end = first + static_cast<std::ptrdiff_t>(matrix);
      if (e % 3 == 2 && groups.lengths[e] > 0) {
        const float value = load_element(found.data() + first, 0, d_type);
        EXPECT_TRUE(std::isnan(value)) << routing.name << ", expert " << e;
        continue;
      }
      ASSERT_TRUE(std::equal(found.begin() + first, found.begin() + end, expected.begin() + first))
          << routing.name << ", expert " << e << " of " << groups.lengths[e] << " rows from "
          << groups.starts[e] << differences(found, expected, e, n, k, d_type);
    }
    EXPECT_TRUE(d.guards_are_whole()) << routing.name;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Configurations, MnMajorTest,
    ::testing::Values(MnMajorCase{"128x128s6c1x1w2pg8", Dtype::kBf16, Dtype::kF32},
                      MnMajorCase{"128x128s6c1x2w2pg8", Dtype::kBf16, Dtype::kF32, true},
                      MnMajorCase{"128x192s4c1x1w2g16", Dtype::kF16, Dtype::kF32},
                      MnMajorCase{"128x256s3c2x1w2g16", Dtype::kBf16, Dtype::kF32},
                      MnMajorCase{"256x128s3c1x2w2g4", Dtype::kF16, Dtype::kF32, true},
                      MnMajorCase{"192x128s4c1x1w3g16", Dtype::kBf16, Dtype::kF32},
                      MnMajorCase{"64x64s8c1x1w1g16", Dtype::kBf16, Dtype::kF32}),
    [](const auto& suite) {
      return f8::format("{}_{}_{}{}", suite.param.config, to_string(suite.param.type),
                        to_string(suite.param.d), suite.param.add ? "_add" : "");
    });

TEST_P(MnMajorTest, IsTheGemmOfEachGroup) {
  for (const Routing& routing : routings(by_device(1024, 40))) {
    const bool small = kEmulated || routing.ends.size() > 100;
    check(routing, small ? 48 : 144, small ? 80 : 272);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
