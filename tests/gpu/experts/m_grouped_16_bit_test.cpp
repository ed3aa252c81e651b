// The M-grouped GEMM of bf16 and f16 operands, against sums on the CPU: by configuration, GEMM and routing.
// grad_input reads each group's matrix as it lies, so that its b is MN-major.
#include <cmath>
#include <map>
#include <random>

#include "recipes/reference/groups.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/gemm/m_grouped.hpp"
#include "tests/gpu/experts/routings.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

struct MGrouped16BitCase {
  const char* config;
  Dtype type;
  Gemm gemm;
  Dtype d = Dtype::kBf16;
};

// Operands are integers, so that sums are exact in any order. All of every third group is NaN, as what lies
// between rows is: no other group sees it.
class MGrouped16BitTest : public GpuTestWith<MGrouped16BitCase> {
 protected:
  struct Operand {
    // Rows of `cols` elements; `is_nan` tells of a row.
    template <class IsNan>
    Operand(const Context& context, int64_t rows, int64_t of_cols, Dtype type, uint64_t seed,
            const IsNan& is_nan)
        : cols(of_cols), ld(cols + 8), values(static_cast<size_t>(rows * cols)) {
      std::mt19937_64 random(seed);
      std::uniform_int_distribution<int> integer(-2, 2);
      for (float& value : values) value = static_cast<float>(integer(random));
      const std::vector<uint8_t> dense =
          reference::to_bytes(reference::Matrix{rows, cols, values}, type);
      std::vector<uint8_t> bytes(static_cast<size_t>(std::max<int64_t>(rows, 1) * ld) * 2, kPoison);
      for (int64_t r = 0; r < rows; ++r) {
        if (is_nan(r)) continue;
        std::copy_n(dense.begin() + r * cols * 2, cols * 2, bytes.begin() + r * ld * 2);
      }
      device = std::make_unique<DeviceBuffer>(context, bytes);
    }
    int64_t cols, ld;
    std::vector<float> values;
    std::unique_ptr<DeviceBuffer> device;
  };

  static bool is_nan_group(size_t group) { return group % 3 == 2; }

  // The sums of all rows of d; b is w [n][k] of a row's group, of which grad_input sums over n. Types and
  // configurations have them in common, so each is computed once.
  static const std::vector<float>& sums_of(const Routing& routing, const reference::Groups& groups,
                                           const Operand& a, const Operand& w, int64_t n,
                                           int64_t k) {
    static std::map<std::pair<Gemm, std::string>, std::vector<float>> known;
    std::vector<float>& all = known[{GetParam().gemm, routing.name}];
    if (!all.empty()) return all;
    const bool output = GetParam().gemm == Gemm::kOutput;
    const int64_t cols = output ? n : k;
    all.resize(static_cast<size_t>(routing.m * cols));
    for (size_t e = 0; e < groups.lengths.size(); ++e) {
      if (is_nan_group(e)) continue;
      const float* const matrix = &w.values[e * static_cast<size_t>(n * k)];
      for (int64_t r = groups.starts[e]; r < groups.starts[e] + groups.lengths[e]; ++r) {
        const float* const row = &a.values[static_cast<size_t>(r * a.cols)];
        float* const sums = &all[static_cast<size_t>(r * cols)];
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < k; ++j) {
            sums[output ? i : j] += row[output ? j : i] * matrix[i * k + j];
          }
        }
      }
    }
    return all;
  }

  // The elements that d should have after it was kPoison, as bytes; rows of a NaN group are NaN.
  static std::vector<uint8_t> expected_of(const Routing& routing, const reference::Groups& groups,
                                          const std::vector<float>& sums, int64_t cols,
                                          bool zero_tail) {
    const Dtype type = GetParam().d;
    std::vector<uint8_t> bytes =
        reference::to_bytes(reference::Matrix{routing.m, cols, sums}, type);
    const auto row_bytes = cols * static_cast<int64_t>(size_bytes(type));
    const auto fill = [&](int64_t first, int64_t rows, uint8_t byte) {
      std::fill_n(bytes.begin() + first * row_bytes, rows * row_bytes, byte);
    };
    for (size_t e = 0; e < groups.lengths.size(); ++e) {
      if (is_nan_group(e)) fill(groups.starts[e], groups.lengths[e], kPoison);
    }
    const int64_t end = routing.ends.back();
    fill(end, routing.m - end, zero_tail && routing.m > 0 ? uint8_t{0} : kPoison);
    return bytes;
  }

  // Where d has other elements than it should: NaN of a NaN group may have any bits.
  static std::string differences(const std::vector<uint8_t>& found,
                                 const std::vector<uint8_t>& expected, int64_t cols) {
    const Dtype type = GetParam().d;
    std::string text;
    const auto count = static_cast<int64_t>(found.size() / size_bytes(type));
    int64_t different = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float of_found = load_element(found.data(), i, type);
      const float of_expected = load_element(expected.data(), i, type);
      if (of_found == of_expected || (std::isnan(of_found) && std::isnan(of_expected))) continue;
      if (different++ < 5) {
        text += f8::format("[{}][{}]: {}, not {}; ", i / cols, i % cols, of_found, of_expected);
      }
    }
    return different == 0 ? "" : text + f8::format("{} of {} differ", different, count);
  }

  void check(const Routing& routing, int64_t n, int64_t k) {
    const auto& [config, type, gemm, d_type] = GetParam();
    const auto experts = static_cast<int64_t>(routing.ends.size());
    const Shape linear{std::max(routing.m, 1), n, k};
    const GemmDesc desc{.gemm = gemm, .shape = linear, .a = type, .b = type, .d = d_type};
    const Shape own = gemm_shape(linear, gemm);
    const reference::Groups groups = reference::groups(routing.ends, routing.m);
    std::vector<bool> nan_rows(static_cast<size_t>(routing.m));
    for (size_t e = 0; e < groups.lengths.size(); ++e) {
      std::fill_n(nan_rows.begin() + groups.starts[e], groups.lengths[e], is_nan_group(e));
    }
    const Operand a(context(), routing.m, own.k, type, 1,
                    [&](int64_t row) { return nan_rows[static_cast<size_t>(row)]; });
    const Operand w(context(), experts * n, k, type, 2,
                    [&](int64_t row) { return is_nan_group(static_cast<size_t>(row / n)); });
    DeviceBuffer d(context(), static_cast<size_t>(linear.m * own.n) * size_bytes(d_type));
    const auto layouts = GroupLayoutPlan::create(context_, linear.m, experts);
    F8_ASSERT_OK(layouts);
    const DeviceBuffer layout(context(), std::vector<uint8_t>(layouts->bytes()));
    const DeviceBuffer offsets(context(), routing.ends);
    const auto grouped = MGroupedGemm::create(
        context_, {.gemm = desc, .layout = group_layout_of(linear.m, experts).value()},
        parse_gemm_config(config).value());
    F8_ASSERT_OK(grouped);
    const std::vector<float>& sums = sums_of(routing, groups, a, w, n, k);
    for (const bool zero_tail : {false, true}) {
      d.poison();
      F8_ASSERT_OK(layouts->run(
          {.offsets = offsets.as<int32_t>(), .m = routing.m, .layout = {layout.as()}}, nullptr));
      F8_ASSERT_OK(grouped->run({.a = a.device->as(),
                                 .b = w.device->as(),
                                 .d = d.as(),
                                 .layout = layout.as(),
                                 .m = routing.m,
                                 .ld_a = a.ld,
                                 .ld_b = w.ld,
                                 .zero_tail = zero_tail},
                                nullptr));
      std::vector<uint8_t> found = d.download<uint8_t>();
      found.resize(static_cast<size_t>(routing.m * own.n) * size_bytes(d_type));
      EXPECT_EQ(differences(found, expected_of(routing, groups, sums, own.n, zero_tail), own.n), "")
          << routing.name << ", zero_tail " << zero_tail;
      EXPECT_TRUE(d.guards_are_whole()) << routing.name;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Configurations, MGrouped16BitTest,
    ::testing::Values(
        MGrouped16BitCase{"64x64s8c1x1w1g16", Dtype::kBf16, Gemm::kOutput},
        MGrouped16BitCase{"64x64s8c1x1w1g16", Dtype::kBf16, Gemm::kGradInput},
        MGrouped16BitCase{"128x128s6c1x1w2pg8", Dtype::kBf16, Gemm::kOutput},
        MGrouped16BitCase{"128x128s6c1x1w2pg8", Dtype::kBf16, Gemm::kGradInput},
        MGrouped16BitCase{"128x128s6c1x2w2pg8", Dtype::kBf16, Gemm::kOutput},
        MGrouped16BitCase{"128x128s6c1x2w2pg8", Dtype::kBf16, Gemm::kGradInput},
        MGrouped16BitCase{"128x256s3c1x1w2g16", Dtype::kF16, Gemm::kOutput, Dtype::kF16},
        MGrouped16BitCase{"128x256s3c1x1w2g16", Dtype::kF16, Gemm::kGradInput, Dtype::kF16},
        MGrouped16BitCase{"128x256s3c1x2w2g16", Dtype::kBf16, Gemm::kOutput},
        MGrouped16BitCase{"128x256s3c1x2w2g16", Dtype::kBf16, Gemm::kGradInput},
        MGrouped16BitCase{"256x128s3c1x1w2g4", Dtype::kBf16, Gemm::kOutput},
        MGrouped16BitCase{"256x128s3c1x2w2g16", Dtype::kBf16, Gemm::kGradInput},
        MGrouped16BitCase{"192x128s4c1x2w3g16", Dtype::kBf16, Gemm::kOutput, Dtype::kF32},
        MGrouped16BitCase{"192x128s4c1x2w3g16", Dtype::kBf16, Gemm::kGradInput, Dtype::kF32},
        MGrouped16BitCase{"128x160s4c1x2w2pg16", Dtype::kBf16, Gemm::kOutput},
        MGrouped16BitCase{"64x128s8c1x4w1g16", Dtype::kF16, Gemm::kGradInput, Dtype::kF16}),
    [](const auto& suite) {
      return f8::format("{}_{}_{}_{}", suite.param.config, to_string(suite.param.type),
                        to_string(suite.param.d), to_string(suite.param.gemm));
    });

TEST_P(MGrouped16BitTest, IsTheGemmOfEachGroup) {
  for (const Routing& routing : routings(by_device(1024, 40))) {
    // N and K that tiles and stages do not divide.
    const bool small = kEmulated || routing.ends.size() > 100;
    check(routing, small ? 48 : 176, small ? 80 : 272);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
