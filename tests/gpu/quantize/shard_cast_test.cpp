// The amax and cast kernels of shards that cut 128x128 blocks, against the reference of the whole, bit
// for bit. One device has all shards: they raise one buffer of words, as ranks reduce them.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "recipes/fp8_layout.hpp"
#include "runtime/quantize/quantize_list.hpp"
#include "tests/gpu/gpu_test.hpp"
#include "tests/gpu/quantize/quantize_data.hpp"
#include "tests/gpu/quantize/scale_layout.hpp"

namespace f8::runtime::gpu {
namespace {

using codegen::CastSpec;
using reference::AmaxOver;
using reference::Matrix;

constexpr CastSpec kBlockCast{.scale_q = codegen::ScaleMode::kBlock128x128,
                              .scale_qt = codegen::ScaleMode::kBlock128x128,
                              .shard = true};

CastSpec with(auto change) {
  CastSpec spec = kBlockCast;
  change(spec);
  return spec;
}

const std::vector<CastSpec> kSpecs = {
    with([](CastSpec& s) { s.pow2 = true; }),  // a weight's under blockwise
    with([](CastSpec& s) { s.pow2 = s.count = true; }),
    with([](CastSpec& s) {
      s.in = Dtype::kF32;
      s.pow2 = true;
    }),
    with([](CastSpec& s) {
      s.in = Dtype::kF16;
      s.out = Dtype::kE5m2;
      s.saturate = true;
    }),
    with([](CastSpec& s) { s.qt = false; }),
    with([](CastSpec& s) { s.q = false; }),
};

struct Shard {
  int64_t first, rows;
};

struct Split {
  int64_t cols;
  std::vector<Shard> shards;

  [[nodiscard]] int64_t rows() const { return shards.back().first + shards.back().rows; }
};

// Whole tensors in shards of a few rows, of odd numbers, inside one block, of many tiles, and of whole
// blocks beside others.
const std::vector<Split> kSplits = {
    {272, {{0, 104}, {104, 104}}},
    {208, {{0, 38}, {38, 38}, {76, 36}}},
    {1040, {{0, 342}, {342, 342}, {684, 340}}},
    {16, {{0, 1}, {1, 127}, {128, 1}, {129, 300}, {429, 83}}},
    {144, {{0, 128}, {128, 255}, {383, 2}, {385, 127}, {512, 256}}},
};

// One shard, and what its cast leaves on the device.
struct OnDevice {
  OnDevice(const Context& context, const CastSpec& spec, const Matrix& x, const Shard& shard,
           int64_t whole_rows, const DeviceBuffer& words)
      : ld_q(row_pitch(x.cols)),
        ld_qt(row_pitch(shard.rows)),
        input(context, reference::to_bytes(x, spec.in, x.cols + 16, kPoison)),
        q(context, static_cast<size_t>(shard.rows * ld_q)),
        qt(context, static_cast<size_t>(x.cols * ld_qt)),
        inv_row(context, floats(spec.scale_q, whole_rows, x.cols)),
        inv_col(context, floats(spec.scale_qt, x.cols, whole_rows)),
        counters(context, std::vector<uint64_t>(2 * sizeof(kernels::CastCounters) / 8)),
        operand{.x = input.as(),
                .rows = shard.rows,
                .cols = x.cols,
                .ld = x.cols + 16,
                .q = q.as<uint8_t>(),
                .qt = qt.as<uint8_t>(),
                .inv_row = inv_row.as<float>(),
                .inv_col = inv_col.as<float>(),
                .counters = spec.count ? counters.as<kernels::CastCounters>() : nullptr,
                .block_amax = words.as<uint32_t>(),
                .first_row = shard.first,
                .whole_rows = whole_rows} {}

  static size_t floats(codegen::ScaleMode mode, int64_t rows, int64_t cols) {
    return static_cast<size_t>(scale_floats(mode, rows, cols)) * sizeof(float);
  }
  [[nodiscard]] bool guards_are_whole() const {
    const std::array all = {&q, &qt, &inv_row, &inv_col, &counters};
    return std::ranges::all_of(all, [](const DeviceBuffer* b) { return b->guards_are_whole(); });
  }

  int64_t ld_q, ld_qt;
  DeviceBuffer input, q, qt, inv_row, inv_col, counters;
  QuantizeOperand operand;
};

// NaNs are equal whatever their payload.
void expect_same(const std::vector<float>& expected, const std::vector<float>& actual,
                 const char* what) {
  ASSERT_EQ(expected.size(), actual.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(expected[i]) && std::isnan(actual[i])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(expected[i]), std::bit_cast<uint32_t>(actual[i]))
        << what << "[" << i << "]: " << expected[i] << " and " << actual[i];
  }
}

class ShardCastTest : public GpuTestWith<CastSpec> {
 protected:
  // Casts all shards of a matrix by a list of so many copies of them.
  void expect_the_whole(const Split& split, Data data, size_t copies) {
    const CastSpec& spec = GetParam();
    const int64_t rows = split.rows(), cols = split.cols;
    const Matrix x = reference::rounded_to(make_data(data, rows, cols, 31), spec.in);
    const NonFinite non_finite = spec.saturate ? NonFinite::kSaturate : NonFinite::kPropagate;
    const auto q = reference::cast(x, AmaxOver::kBlock128x128, spec.out, spec.pow2, non_finite);
    const auto qt = reference::cast(reference::transpose(x), AmaxOver::kBlock128x128, spec.out,
                                    spec.pow2, non_finite);
    const auto amax = reference::amax(x, AmaxOver::kBlock128x128);
    const DeviceBuffer words(context(), std::vector<uint32_t>(amax.size()));
    std::vector<std::unique_ptr<OnDevice>> all;
    std::vector<QuantizeOperand> operands;
    std::vector<MatrixSize> sizes;
    for (size_t copy = 0; copy < copies; ++copy) {
      for (const Shard& shard : split.shards) {
        const auto at = x.values.begin() + shard.first * cols;
        const Matrix own{shard.rows, cols, {at, at + shard.rows * cols}};
        all.push_back(std::make_unique<OnDevice>(context(), spec, own, shard, rows, words));
        operands.push_back(all.back()->operand);
        sizes.push_back({shard.rows, cols});
      }
    }
    const auto list = QuantizeList::plan(context_, spec, sizes, {.given_maxima = true});
    F8_ASSERT_OK(list);
    EXPECT_EQ(list->workspace_bytes(), 0U);
    F8_ASSERT_OK(list->find(operands, nullptr));
    expect_same(amax, words.download<float>(), "amax");
    F8_ASSERT_OK(list->cast(operands, nullptr));
    EXPECT_TRUE(words.guards_are_whole());
    for (size_t i = 0; i < all.size() && !HasFailure(); ++i) {
      const Shard& shard = split.shards[i % split.shards.size()];
      SCOPED_TRACE(f8::format("{}, shard {}: {} rows from {} on of {} x {}", codegen::key(spec), i,
                              shard.rows, shard.first, rows, cols));
      expect_shard(*all[i], shard, q, qt);
      if (spec.count) expect_counts(*all[i], shard, x, q);
    }
  }

 private:
  void expect_shard(const OnDevice& device, const Shard& shard, const reference::Fp8Matrix& q,
                    const reference::Fp8Matrix& qt) {
    EXPECT_TRUE(device.guards_are_whole());
    const auto byte = [](const std::vector<uint8_t>& bytes, int64_t at) {
      return int{bytes[static_cast<size_t>(at)]};
    };
    if (GetParam().q) {
      const auto bytes = device.q.download<uint8_t>();
      for (int64_t r = 0; r < shard.rows; ++r) {
        for (int64_t c = 0; c < device.ld_q; ++c) {
          const int expected = c < q.cols ? byte(q.bits, (shard.first + r) * q.cols + c) : kPoison;
          ASSERT_EQ(byte(bytes, r * device.ld_q + c), expected) << "q[" << r << "][" << c << "]";
        }
      }
      expect_same(device_layout(q), device.inv_row.download<float>(), "inv_row");
    }
    if (GetParam().qt) {
      const auto bytes = device.qt.download<uint8_t>();
      for (int64_t c = 0; c < qt.rows; ++c) {
        for (int64_t r = 0; r < device.ld_qt; ++r) {
          const int expected = r < shard.rows ? byte(qt.bits, c * qt.cols + shard.first + r) : 0;
          ASSERT_EQ(byte(bytes, c * device.ld_qt + r), expected) << "qt[" << c << "][" << r << "]";
        }
      }
      expect_same(device_layout(qt), device.inv_col.download<float>(), "inv_col");
    }
  }

  static void expect_counts(const OnDevice& device, const Shard& shard, const Matrix& x,
                            const reference::Fp8Matrix& whole) {
    const auto at = [&](const auto& from) {
      return std::pair(from.begin() + shard.first * x.cols,
                       from.begin() + (shard.first + shard.rows) * x.cols);
    };
    const Matrix own{shard.rows, x.cols, {at(x.values).first, at(x.values).second}};
    reference::Fp8Matrix copy = whole;
    copy.rows = shard.rows;
    copy.first_row = shard.first;
    copy.bits = {at(whole.bits).first, at(whole.bits).second};
    const reference::CastCounts expected = reference::count_cast(own, copy);
    for (const auto& counted : device.counters.download<kernels::CastCounters>()) {
      EXPECT_EQ(counted.elements, own.values.size());
      EXPECT_EQ(counted.saturated, expected.saturated);
      EXPECT_EQ(counted.flushed, expected.flushed);
      EXPECT_EQ(counted.non_finite, expected.non_finite);
      expect_same({reference::amax(own, AmaxOver::kTensor)[0]},
                  {std::bit_cast<float>(counted.amax)}, "counted amax");
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Specs, ShardCastTest, ::testing::ValuesIn(kSpecs), [](const auto& suite) {
  std::string name = codegen::key(suite.param);
  std::ranges::replace_if(
      name, [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
});

TEST_P(ShardCastTest, HasTheBitsOfTheWhole) {
  for (const Split& split : kSplits) {
    for (const Data data : {Data::kOutliers, Data::kNonFinite}) {
      SCOPED_TRACE(split.cols);
      expect_the_whole(split, data, 1);
    }
  }
  expect_the_whole(kSplits.front(), Data::kTiny, 1);
  if (GetParam().in == Dtype::kBf16) expect_the_whole(kSplits.front(), Data::kHuge, 1);
}

// More than one launch takes, so that casts follow each other without a pause.
TEST_P(ShardCastTest, ListsHaveTheBitsOfTheWhole) {
  expect_the_whole(kSplits[1], Data::kOutliers, 20);
  expect_the_whole(kSplits[3], Data::kNonFinite, 2);
}

}  // namespace
}  // namespace f8::runtime::gpu
