// The casts of groups of rows against the reference of each group alone, bit for bit: by type, scales
// and routing, and of equal groups, as the weights of experts.
#include "runtime/experts/group_cast.hpp"

#include "recipes/fp8_layout.hpp"
#include "recipes/reference_groups.hpp"
#include "runtime/experts/group_layout.hpp"
#include "tests/gpu/experts/routings.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

using reference::AmaxOver;
using reference::Matrix;

constexpr uint8_t kPoisonOfRow = 0xff;

AmaxOver over_of(codegen::ScaleMode mode) {
  return mode == codegen::ScaleMode::kTensor ? AmaxOver::kTensor : AmaxOver::kRow;
}

Matrix rows_of(const Matrix& x, int64_t first, int64_t count) {
  Matrix out{count, x.cols, {}};
  const auto from = x.values.begin() + first * x.cols;
  out.values.assign(from, from + count * x.cols);
  return out;
}

class GroupCastTest : public GpuTestWith<const char*> {
 protected:
  static codegen::CastSpec spec_of(const char* key) {
    return std::get<codegen::CastSpec>(codegen::parse_kernel_spec(key).value());
  }

  // The buffers of a cast of `groups` groups.
  struct Copies {
    Copies(const Context& context, const GroupCastPlan& plan, int64_t rows, int64_t cols,
           int64_t groups, int64_t group_rows)
        : q(context, fp8_copy_bytes(rows, cols)),
          qt(context, std::max<size_t>(static_cast<size_t>(groups) *
                                           fp8_copy_bytes(cols, std::max<int64_t>(group_rows, 1)),
                                       1)),
          scale(context, static_cast<size_t>(groups * kernels::kScaleStride) * sizeof(float)),
          inv_row(context, static_cast<size_t>(rows) * sizeof(float)),
          inv_col(context, static_cast<size_t>(groups * cols) * sizeof(float)),
          words(context, plan.amax_words(rows, groups) * sizeof(uint32_t)) {}
    DeviceBuffer q, qt, scale, inv_row, inv_col, words;

    [[nodiscard]] bool guards_are_whole() const {
      return q.guards_are_whole() && qt.guards_are_whole() && scale.guards_are_whole() &&
             inv_row.guards_are_whole() && inv_col.guards_are_whole() && words.guards_are_whole();
    }
  };
  static GroupCastCall call_of(const kernels::GroupsOf& groups, const DeviceBuffer& x, int64_t rows,
                               const Copies& to) {
    return {.groups = groups,
            .x = x.as(),
            .rows = rows,
            .words = to.words.as<uint32_t>(),
            .q = to.q.as<uint8_t>(),
            .qt = to.qt.as<uint8_t>(),
            .scale = to.scale.as<float>(),
            .inv_row = to.inv_row.as<float>(),
            .inv_col = to.inv_col.as<float>()};
  }
};

INSTANTIATE_TEST_SUITE_P(
    Specs, GroupCastTest,
    ::testing::Values("cast/bf16.e4m3/tensor/q/group", "cast/bf16.e5m2/tensor/q/group",
                      "cast/bf16.e4m3/axis/q/group", "cast/f16.e4m3/axis/q/pow2/group",
                      "cast/f32.e4m3/axis/q/pow2/group", "cast/f32.e5m2/tensor/q/hold/group"),
    [](const auto& suite) {
      std::string name = suite.param;
      std::ranges::replace_if(
          name, [](char c) { return std::isalnum(c) == 0; }, '_');
      return name;
    });

// The tail holds NaN, which reaches no scale, and its rows are not written.
TEST_P(GroupCastTest, IsTheCastOfEachGroupAlone) {
  const codegen::CastSpec spec = spec_of(GetParam());
  constexpr int64_t kCols = 272;
  for (const Routing& routing : routings(by_device(1024, 128))) {
    if (routing.m == 0) continue;
    const auto experts = static_cast<int64_t>(routing.ends.size());
    const Matrix x = reference::rounded_to(
        reference::random_matrix(routing.m, kCols, 7, reference::Distribution::kOutliers), spec.in);
    std::vector<uint8_t> bytes = reference::to_bytes(x, spec.in);
    const size_t row_bytes = static_cast<size_t>(kCols) * size_bytes(spec.in);
    std::fill(bytes.begin() +
                  static_cast<std::ptrdiff_t>(static_cast<size_t>(routing.ends.back()) * row_bytes),
              bytes.end(), kPoisonOfRow);
    const DeviceBuffer device_x(context(), bytes);
    const auto layouts = GroupLayoutPlan::create(context_, routing.m, experts);
    F8_ASSERT_OK(layouts);
    const DeviceBuffer layout(context(), std::vector<uint8_t>(layouts->bytes()));
    const DeviceBuffer offsets(context(), routing.ends);
    const auto plan = GroupCastPlan::create(context_, spec, kCols);
    F8_ASSERT_OK(plan);
    const Copies to(context(), *plan, routing.m, kCols, experts, 0);
    F8_ASSERT_OK(layouts->run(
        {.offsets = offsets.as<int32_t>(), .m = routing.m, .layout = {layout.as()}}, nullptr));
    const kernels::GroupsOf groups{.words = layout.as<int32_t>(),
                                   .layout = group_layout_of(routing.m, experts).value(),
                                   .count = 0,
                                   .rows = 0};
    F8_ASSERT_OK(plan->run(call_of(groups, device_x, routing.m, to), nullptr));
    const auto q = to.q.download<uint8_t>();
    const auto scale = to.scale.download<float>();
    const auto inv_row = to.inv_row.download<float>();
    const bool tensor = spec.scale_q == codegen::ScaleMode::kTensor;
    int64_t start = 0;
    for (size_t e = 0; e < routing.ends.size(); ++e) {
      const int64_t rows = routing.ends[e] - start;
      if (rows == 0) continue;
      const auto expected =
          reference::cast(rows_of(x, start, rows), over_of(spec.scale_q), spec.out, spec.pow2,
                          spec.saturate ? NonFinite::kSaturate : NonFinite::kPropagate);
      if (tensor) {
        ASSERT_EQ(scale[e * kernels::kScaleStride], expected.scales[0]) << routing.name;
        ASSERT_EQ(scale[e * kernels::kScaleStride + kernels::kInverse], expected.inv_scales[0]);
      }
      for (int64_t r = 0; r < rows; ++r) {
        if (!tensor) {
          ASSERT_EQ(inv_row[static_cast<size_t>(start + r)],
                    expected.inv_scales[static_cast<size_t>(r)])
              << routing.name;
        }
        const auto from = q.begin() + (start + r) * row_pitch(kCols);
        ASSERT_TRUE(std::equal(from, from + kCols, expected.bits.begin() + r * kCols))
            << routing.name << ", expert " << e << ", row " << r;
      }
      start = routing.ends[e];
    }
    const auto tail = q.begin() + start * row_pitch(kCols);
    EXPECT_TRUE(std::all_of(tail, q.end(), [](uint8_t b) { return b == kPoison; })) << routing.name;
    EXPECT_TRUE(to.guards_are_whole()) << routing.name;
  }
}

class EqualGroupsTest : public GroupCastTest {};
INSTANTIATE_TEST_SUITE_P(Specs, EqualGroupsTest,
                         ::testing::Values("cast/bf16.e4m3/tensor/q+qt/group",
                                           "cast/bf16.e4m3/axis/q+qt/pow2/group",
                                           "cast/bf16.e4m3/axis+tensor/q+qt/pow2/group",
                                           "cast/f32.e4m3/axis/qt/pow2/group",
                                           "cast/f16.e4m3/axis/q/group",
                                           "cast/bf16.e5m2/tensor/qt/group"),
                         [](const auto& suite) {
                           std::string name = suite.param;
                           std::ranges::replace_if(
                               name, [](char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

TEST_P(EqualGroupsTest, AreTheCastsOfEachWeight) {
  const codegen::CastSpec spec = spec_of(GetParam());
  constexpr int64_t kExperts = 5, kN = 144, kK = 272;
  const Matrix w = reference::rounded_to(
      reference::random_matrix(kExperts * kN, kK, 8, reference::Distribution::kOutliers), spec.in);
  const DeviceBuffer device_w(context(), reference::to_bytes(w, spec.in));
  const auto plan = GroupCastPlan::create(context_, spec, kK);
  F8_ASSERT_OK(plan);
  const Copies to(context(), *plan, kExperts * kN, kK, kExperts, kN);
  const kernels::GroupsOf groups{.words = nullptr, .layout = {}, .count = kExperts, .rows = kN};
  F8_ASSERT_OK(plan->run(call_of(groups, device_w, kExperts * kN, to), nullptr));
  const auto scale = to.scale.download<float>();
  const auto check = [&](bool transposed, const std::vector<uint8_t>& bits,
                         const std::vector<float>& inverses, codegen::ScaleMode mode) {
    for (int64_t e = 0; e < kExperts; ++e) {
      Matrix of = rows_of(w, e * kN, kN);
      if (transposed) of = transpose(of);
      const auto expected = reference::cast(of, over_of(mode), spec.out, spec.pow2);
      const int64_t pitch = row_pitch(of.cols);
      for (int64_t r = 0; r < of.rows; ++r) {
        const auto from = bits.begin() + (e * of.rows + r) * pitch;
        ASSERT_TRUE(std::equal(from, from + of.cols, expected.bits.begin() + r * of.cols))
            << "expert " << e << ", row " << r << " of " << (transposed ? "qt" : "q");
        if (mode == codegen::ScaleMode::kAxis) {
          ASSERT_EQ(inverses[static_cast<size_t>(e * of.rows + r)],
                    expected.inv_scales[static_cast<size_t>(r)]);
        }
      }
      if (mode == codegen::ScaleMode::kTensor) {
        ASSERT_EQ(scale[static_cast<size_t>(e * kernels::kScaleStride + kernels::kInverse)],
                  expected.inv_scales[0]);
      }
    }
  };
  if (spec.q) {
    check(false, to.q.download<uint8_t>(), to.inv_row.download<float>(), spec.scale_q);
  }
  if (spec.qt) {
    check(true, to.qt.download<uint8_t>(), to.inv_col.download<float>(), spec.scale_qt);
  }
  EXPECT_TRUE(to.guards_are_whole());
}

}  // namespace
}  // namespace f8::runtime::gpu
