// The M-grouped GEMM gives for each group, bit for bit, what the dense GEMM of the same configuration
// gives for the group's rows, and writes nothing else: by configuration, scales and routing.
#include "runtime/gemm/m_grouped.hpp"

#include "recipes/reference/groups.hpp"
#include "runtime/experts/group_cast.hpp"
#include "runtime/experts/group_layout.hpp"
#include "tests/gpu/experts/random_operands.hpp"
#include "tests/gpu/experts/routings.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

using codegen::ScaleMode;

struct MGroupedCase {
  const char* config;
  ScaleMode scale;
  bool fast;
  Dtype d = Dtype::kBf16;
  bool scalar_b = false;
  Gemm gemm = Gemm::kOutput;
};

class MGroupedTest : public GpuTestWith<MGroupedCase> {
 protected:
  // The operands of all groups, and their results by both ways.
  struct Groups {
    Groups(const Context& context, const Routing& routing, Shape of, size_t d_bytes)
        : own(of),
          pitch(static_cast<size_t>(row_pitch(own.k))),
          a(context, random_fp8(static_cast<size_t>(own.m) * pitch, 1)),
          b(context, random_fp8(routing.ends.size() * static_cast<size_t>(own.n) * pitch, 2)),
          experts(static_cast<int64_t>(routing.ends.size())),
          scale_rows(scale_rows_of_groups(own.m, experts)),
          // The inverse scales of rows, of groups, which lie kScaleStride apart, or of blocks.
          inv_a(context, random_scales(static_cast<size_t>(std::max(
                                           own.m + experts * kernels::kScaleStride,
                                           ceil_div(own.k, kernels::kCastTile) * scale_rows)),
                                       3)),
          inv_b(context, random_scales(static_cast<size_t>(experts * own.n), 4)),
          row_bytes(static_cast<size_t>(own.n) * d_bytes),
          alone(context, static_cast<size_t>(own.m) * row_bytes),
          together(context, static_cast<size_t>(own.m) * row_bytes) {}

    Shape own;
    size_t pitch;
    DeviceBuffer a, b;
    int64_t experts, scale_rows;
    DeviceBuffer inv_a, inv_b;
    size_t row_bytes;
    DeviceBuffer alone, together;
  };

  [[nodiscard]] static GemmDesc describe(Shape linear) {
    const auto& [config, scale, fast, d, scalar_b, gemm] = GetParam();
    return {
        .gemm = gemm, .shape = linear, .d = d, .scale = scale, .fast = fast, .scalar_b = scalar_b};
  }

  // The 1x128 scales of a group's rows alone, which begin at row `first` of all.
  static std::vector<float> scales_of_group(const Groups& groups, int64_t first, int64_t rows) {
    const auto all = groups.inv_a.download<float>();
    std::vector<float> own;
    for (int64_t block = 0; block < ceil_div(groups.own.k, kernels::kCastTile); ++block) {
      const auto from = all.begin() + block * groups.scale_rows + first;
      own.insert(own.end(), from, from + kernels::padded_scales(rows));
    }
    return own;
  }

  // Computes each group by a dense GEMM.
  void run_dense(const GemmDesc& desc, const Routing& routing, const Groups& groups) {
    const auto dense = GemmPlan::create(
        context_, desc,
        GemmChoice{parse_gemm_kernel(Provider::kGenerated, GetParam().config).value()});
    F8_ASSERT_OK(dense);
    const bool axis = desc.scale == ScaleMode::kAxis;
    const bool block = is_block(desc.scale);
    const reference::Groups places = reference::groups(routing.ends, routing.m);
    int64_t start = 0;
    for (size_t e = 0; e < routing.ends.size(); ++e) {
      const auto row = static_cast<size_t>(start);
      const size_t rows_b = e * static_cast<size_t>(groups.own.n);
      GemmCall call;
      call.a = groups.a.as<uint8_t>() + row * groups.pitch;
      call.b = groups.b.as<uint8_t>() + rows_b * groups.pitch;
      call.d = groups.alone.as<uint8_t>() + row * groups.row_bytes;
      call.inv_scale_a = groups.inv_a.as<float>() + (axis ? row : e * kernels::kScaleStride);
      call.inv_scale_b =
          groups.inv_b.as<float>() + (axis && !desc.scalar_b ? rows_b : e * kernels::kScaleStride);
      call.m = routing.ends[e] - start;
      start = routing.ends[e];
      if (call.m == 0) continue;
      const DeviceBuffer scales(context(), block ? scales_of_group(groups, places.scales[e], call.m)
                                                 : std::vector<float>(1));
      if (block) {
        call.inv_scale_a = scales.as<float>();
        call.inv_scale_b = groups.inv_b.as<float>() +
                           static_cast<int64_t>(e) * kernels::scales_2d(groups.own.n, groups.own.k);
      }
      F8_ASSERT_OK((*dense)->run(call, nullptr, nullptr));
      if (block) F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
    }
  }

  void check(const Routing& routing, int64_t n, int64_t k) {
    const Shape linear{std::max(routing.m, 1), n, k};
    const GemmDesc desc = describe(linear);
    Groups groups(context(), routing, gemm_shape(linear, desc.gemm), size_bytes(desc.d));
    run_dense(desc, routing, groups);
    const auto layouts =
        GroupLayoutPlan::create(context_, linear.m, static_cast<int64_t>(routing.ends.size()));
    F8_ASSERT_OK(layouts);
    const DeviceBuffer layout(context(), std::vector<uint8_t>(layouts->bytes()));
    const DeviceBuffer offsets(context(), routing.ends);
    const auto grouped = MGroupedGemm::create(
        context_,
        {.gemm = desc,
         .layout = group_layout_of(linear.m, static_cast<int64_t>(routing.ends.size())).value()},
        parse_gemm_config(GetParam().config).value());
    F8_ASSERT_OK(grouped);
    std::vector<uint8_t> expected = groups.alone.download<uint8_t>();
    for (const bool zero_tail : {false, true}) {
      groups.together.poison();
      // The layout and the GEMM follow each other without a wait, as in a step.
      F8_ASSERT_OK(layouts->run(
          {.offsets = offsets.as<int32_t>(), .m = routing.m, .layout = {layout.as()}}, nullptr));
      F8_ASSERT_OK(grouped->run({.a = groups.a.as(),
                                 .b = groups.b.as(),
                                 .d = groups.together.as(),
                                 .inv_scale_a = groups.inv_a.as<float>(),
                                 .inv_scale_b = groups.inv_b.as<float>(),
                                 .layout = layout.as(),
                                 .m = routing.m,
                                 .scale_rows = groups.scale_rows,
                                 .zero_tail = zero_tail},
                                nullptr));
      const size_t tail = static_cast<size_t>(routing.ends.back()) * groups.row_bytes;
      if (zero_tail && routing.m > 0) {
        std::fill(expected.begin() + static_cast<std::ptrdiff_t>(tail), expected.end(), uint8_t{0});
      }
      EXPECT_EQ(groups.together.download<uint8_t>(), expected)
          << routing.name << ", zero_tail " << zero_tail;
      EXPECT_TRUE(groups.together.guards_are_whole()) << routing.name;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Configurations, MGroupedTest,
    ::testing::Values(MGroupedCase{"128x128s6c1x1w2pg8", ScaleMode::kTensor, true},
                      MGroupedCase{"128x128s6c1x2w2pg8", ScaleMode::kAxis, true},
                      MGroupedCase{"64x256s4c1x1w2pg16", ScaleMode::kAxis, true},
                      MGroupedCase{"128x160s4c1x2w2pg16", ScaleMode::kTensor, true},
                      MGroupedCase{"128x256s3c1x1w2g16", ScaleMode::kAxis, false},
                      MGroupedCase{"128x256s3c1x2w2g16", ScaleMode::kTensor, false},
                      MGroupedCase{"256x128s3c1x1w2g4", ScaleMode::kAxis, false, Dtype::kBf16, true,
                                   Gemm::kGradInput},
                      MGroupedCase{"192x128s4c1x2w3g16", ScaleMode::kTensor, false, Dtype::kF16,
                                   false, Gemm::kGradInput},
                      MGroupedCase{"128x96s6c1x2w2g16", ScaleMode::kAxis, true, Dtype::kF32},
                      MGroupedCase{"64x128s8c1x4w1g16", ScaleMode::kAxis, false, Dtype::kF32, true},
                      MGroupedCase{"128x128s5c1x1w2g16", ScaleMode::kBlock128x128, false},
                      MGroupedCase{"128x256s3c1x2w2g16", ScaleMode::kBlock128x128, false},
                      MGroupedCase{"64x128s8c1x4w1g16", ScaleMode::kBlock128x128, false,
                                   Dtype::kF32, false, Gemm::kGradInput},
                      MGroupedCase{"64x64s8c1x1w1g16", ScaleMode::kTensor, true, Dtype::kF32}),
    [](const auto& suite) {
      return f8::format("{}_{}_{}{}{}{}", suite.param.config, to_string(suite.param.scale),
                        suite.param.fast ? "fast" : "precise", to_string(suite.param.d),
                        suite.param.scalar_b ? "_scalar" : "",
                        suite.param.gemm == Gemm::kOutput ? "" : "_grad_input");
    });

TEST_P(MGroupedTest, IsTheDenseGemmOfEachGroup) {
  for (const Routing& routing : routings(by_device(1024, 40))) {
    // N and K that tiles do not divide, and with many experts small ones.
    const bool small = routing.ends.size() > 100;
    check(routing, small ? 80 : by_device(400, 144), small ? 48 : by_device(528, 272));
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
