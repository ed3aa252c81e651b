// The cast kernels against the reference, bit for bit: both copies, scales, tails.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include "recipes/scales/scale.hpp"
#include "runtime/gemm/gemm.hpp"
#include "runtime/quantize/quantize_list.hpp"
#include "tests/gpu/gpu_test.hpp"
#include "tests/gpu/quantize/quantize_data.hpp"
#include "tests/gpu/quantize/scale_layout.hpp"

namespace f8::runtime::gpu {
namespace {

using reference::AmaxOver;

// A matrix on the device with everything that the amax and cast kernels of `spec` may write.
struct CastResult {
  CastResult(Context& context, const codegen::CastSpec& spec, const reference::Matrix& x)
      : ld_q(row_pitch(x.cols)),
        ld_qt(row_pitch(x.rows)),
        input(context, reference::to_bytes(x, spec.in)),
        partials(context, std::vector<uint32_t>(static_cast<size_t>(
                              amax_partials(x.rows, x.cols, context.device().sm_count)))),
        row_amax(context, std::vector<uint32_t>(static_cast<size_t>(x.rows))),
        col_amax(context, std::vector<uint32_t>(static_cast<size_t>(x.cols))),
        delayed(context, delayed_scale(spec)),
        recorded(context, std::vector<uint32_t>(1)),
        q(context, static_cast<size_t>(x.rows * ld_q)),
        qt(context, static_cast<size_t>(x.cols * ld_qt)),
        scale(context, (kernels::kInverse + 1) * sizeof(float)),
        inv_row(context, static_cast<size_t>(scale_floats(spec.scale_q, x.rows, x.cols)) * 4),
        inv_col(context, static_cast<size_t>(scale_floats(spec.scale_qt, x.cols, x.rows)) * 4),
        operand{.x = input.as(),
                .rows = x.rows,
                .cols = x.cols,
                .partials = partials.as<uint32_t>(),
                .row_amax = row_amax.as<uint32_t>(),
                .col_amax = col_amax.as<uint32_t>(),
                .q = q.as<uint8_t>(),
                .qt = qt.as<uint8_t>(),
                .scale = scale.as<float>(),
                .inv_row = inv_row.as<float>(),
                .inv_col = inv_col.as<float>(),
                .delayed = delayed.as<float>(),
                .recorded_amax = recorded.as<uint32_t>()} {}

  // The delayed scale comes from an earlier tensor whose amax was kDelayedAmax.
  static std::vector<float> delayed_scale(const codegen::CastSpec& spec) {
    return {scale_from_amax(kDelayedAmax, spec.out, spec.pow2)};
  }
  static constexpr float kDelayedAmax = 3;

  int64_t ld_q, ld_qt;
  DeviceBuffer input, partials, row_amax, col_amax, delayed, recorded, q, qt, scale, inv_row,
      inv_col;
  QuantizeOperand operand;
};

// NaNs are equal whatever their payload.
void expect_same_scales(const std::vector<float>& expected, const std::vector<float>& actual,
                        const char* what) {
  ASSERT_EQ(expected.size(), actual.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(expected[i]) && std::isnan(actual[i])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(expected[i]), std::bit_cast<uint32_t>(actual[i]))
        << what << "[" << i << "]: " << expected[i] << " and " << actual[i];
  }
}

void expect_tensor_scale(const reference::Fp8Matrix& expected, const std::vector<float>& actual) {
  expect_same_scales({expected.scales[0], expected.inv_scales[0]},
                     {actual[0], actual[kernels::kInverse]}, "scale");
}

// `beyond`: what lies between the end of a row and the next one.
void expect_same_bytes(const std::vector<uint8_t>& expected, int64_t cols,
                       const std::vector<uint8_t>& actual, int64_t ld, uint8_t beyond,
                       const char* what) {
  for (size_t i = 0; i < actual.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / ld;
    const int64_t col = static_cast<int64_t>(i) % ld;
    const uint8_t want = col < cols ? expected[static_cast<size_t>(row * cols + col)] : beyond;
    ASSERT_EQ(int{actual[i]}, int{want}) << what << "[" << row << "][" << col << "]";
  }
}

reference::Fp8Matrix expected_copy(const codegen::CastSpec& spec, codegen::ScaleMode mode,
                                   const reference::Matrix& x) {
  const NonFinite non_finite = spec.saturate ? NonFinite::kSaturate : NonFinite::kPropagate;
  if (spec.delayed && mode == codegen::ScaleMode::kTensor) {
    return reference::cast_delayed(x, spec.out, CastResult::delayed_scale(spec)[0], non_finite);
  }
  return reference::cast(x, over(mode), spec.out, spec.pow2, non_finite);
}

void expect_like_reference(const codegen::CastSpec& spec, const reference::Matrix& x,
                           const CastResult& device) {
  const auto expect_scales = [&](const reference::Fp8Matrix& expected, codegen::ScaleMode mode,
                                 const DeviceBuffer& inverses, const char* what) {
    if (mode == codegen::ScaleMode::kTensor) {
      expect_tensor_scale(expected, device.scale.download<float>());
    } else {
      expect_same_scales(device_layout(expected), inverses.download<float>(), what);
    }
  };
  if (spec.q) {
    const auto expected = expected_copy(spec, spec.scale_q, x);
    expect_same_bytes(expected.bits, x.cols, device.q.download<uint8_t>(), device.ld_q, kPoison,
                      "q");
    expect_scales(expected, spec.scale_q, device.inv_row, "inv_row");
  }
  if (spec.qt) {
    const auto expected = expected_copy(spec, spec.scale_qt, reference::transpose(x));
    expect_same_bytes(expected.bits, x.rows, device.qt.download<uint8_t>(), device.ld_qt, 0, "qt");
    expect_scales(expected, spec.scale_qt, device.inv_col, "inv_col");
  }
  if (codegen::has_scale(spec, codegen::ScaleMode::kTensor)) {
    const float amax = reference::amax(x, AmaxOver::kTensor)[0];
    expect_same_scales({amax}, device.recorded.download<float>(), "recorded amax");
  }
  for (const DeviceBuffer* buffer :
       {&device.partials, &device.row_amax, &device.col_amax, &device.recorded, &device.q,
        &device.qt, &device.scale, &device.inv_row, &device.inv_col}) {
    EXPECT_TRUE(buffer->guards_are_whole());
  }
}

class CastTest : public GpuTestWith<codegen::CastSpec> {
 protected:
  void run(kernels::AmaxArgs amax_arguments, const kernels::CastArgs& cast_arguments) {
    if (GetParam().one_launch) {
      const auto quantize = context().kernel(GetParam());
      F8_ASSERT_OK(quantize);
      const DeviceBuffer sync(context(), quantize_sync_bytes(sms()));
      kernels::QuantizeArgs arguments{};
      arguments.cast = cast_arguments;
      arguments.sync = sync.as<kernels::u64>();
      F8_ASSERT_OK(launch_quantize(driver(), **quantize, arguments, true, nullptr));
      EXPECT_TRUE(sync.guards_are_whole());
      return;
    }
    if (const auto before = amax_before(GetParam())) {
      const auto amax = context().kernel(*before);
      F8_ASSERT_OK(amax);
      F8_ASSERT_OK(launch_amax(driver(), **amax, amax_arguments, true, nullptr));
    }
    const auto cast = context().kernel(GetParam());
    F8_ASSERT_OK(cast);
    F8_ASSERT_OK(launch_cast(driver(), **cast, cast_arguments, true, nullptr));
  }
  [[nodiscard]] kernels::AmaxArgs amax_arguments(std::span<const QuantizeOperand> operands) const {
    const auto before = amax_before(GetParam());
    return before ? amax_args(*before, sms(), operands) : kernels::AmaxArgs{};
  }
  [[nodiscard]] kernels::CastArgs cast_arguments(std::span<const QuantizeOperand> operands) const {
    return cast_args(GetParam(), sms(), operands);
  }
  void run(std::span<const QuantizeOperand> operands) {
    run(amax_arguments(operands), cast_arguments(operands));
  }

 private:
  [[nodiscard]] int sms() const { return context().device().sm_count; }
};

std::vector<codegen::CastSpec> cast_specs() {
  std::vector<codegen::CastSpec> out;
  const auto add = [&](const std::string& key) {
    out.push_back(std::get<codegen::CastSpec>(codegen::parse_kernel_spec(key).value()));
  };
  for (const char* type : {"e4m3", "e5m2"}) {
    for (const char* pow2 : {"", "/pow2"}) {
      for (const char* scale : {"tensor", "delayed", "axis", "block1x128", "block128x128"}) {
        for (const char* copies : {"q+qt", "q", "qt"}) {
          const bool plain = type == std::string_view("e4m3") && *pow2 == 0;
          if (!plain && copies != std::string_view("q+qt")) continue;
          add(f8::format("cast/bf16.{}/{}/{}{}", type, scale, copies, pow2));
        }
      }
    }
  }
  for (const char* scales : {"axis+tensor", "tensor+axis", "delayed+axis", "axis+delayed",
                             "block1x128+axis", "tensor+block128x128", "block128x128+block1x128"}) {
    add(f8::format("cast/bf16.e4m3/{}/q+qt/pow2", scales));
  }
  for (const char* scales : {"delayed", "axis+delayed"}) {
    add(f8::format("cast/bf16.e4m3/{}/q+qt/hold", scales));
  }
  for (const char* kernel :
       {"bf16.e4m3/tensor/q+qt", "bf16.e5m2/tensor/q", "bf16.e4m3/axis/q+qt", "bf16.e5m2/axis/qt",
        "bf16.e4m3/axis+tensor/q+qt/pow2", "bf16.e4m3/axis/q", "bf16.e5m2/axis/q/pow2"}) {
    add(f8::format("quantize/{}", kernel));
  }
  return out;
}

std::string cast_name(const ::testing::TestParamInfo<codegen::CastSpec>& suite) {
  std::string text = codegen::key(suite.param);
  std::ranges::replace_if(
      text, [](char c) { return std::isalnum(c) == 0; }, '_');
  return text;
}
INSTANTIATE_TEST_SUITE_P(Specs, CastTest, ::testing::ValuesIn(cast_specs()), cast_name);

// The kernels of some tests are those that the test is about.
template <class Predicate>
std::vector<codegen::CastSpec> specs_with(Predicate&& predicate) {
  std::vector<codegen::CastSpec> some = cast_specs();
  std::erase_if(some, [&](const codegen::CastSpec& spec) { return !predicate(spec); });
  return some;
}
bool has_rows_alone(const codegen::CastSpec& spec) {
  return spec.one_launch && codegen::scales_rows_alone(spec);
}
bool has_tiles_in_one_launch(const codegen::CastSpec& spec) {
  return spec.one_launch && !codegen::scales_rows_alone(spec);
}
bool may_take_tile_amax(const codegen::CastSpec& spec) {
  const auto before = amax_before(spec);
  return before && fits_tile_amax(*before, 1, 16) && !spec.one_launch;
}
bool may_be_a_list(const codegen::CastSpec& spec) {
  return !spec.one_launch;
}

class RowsCastTest : public CastTest {};
INSTANTIATE_TEST_SUITE_P(Specs, RowsCastTest, ::testing::ValuesIn(specs_with(has_rows_alone)),
                         cast_name);
class TilesCastTest : public CastTest {};
INSTANTIATE_TEST_SUITE_P(Specs, TilesCastTest,
                         ::testing::ValuesIn(specs_with(has_tiles_in_one_launch)), cast_name);
class TileAmaxCastTest : public CastTest {};
INSTANTIATE_TEST_SUITE_P(Specs, TileAmaxCastTest,
                         ::testing::ValuesIn(specs_with(may_take_tile_amax)), cast_name);
// Delayed scales of every type of input.
std::vector<codegen::CastSpec> delayed_specs() {
  std::vector<codegen::CastSpec> out;
  for (const char* types : {"bf16.e4m3", "f16.e5m2", "f32.e4m3"}) {
    for (const char* policy : {"", "/hold"}) {
      const std::string key = f8::format("cast/{}/delayed/q+qt{}", types, policy);
      out.push_back(std::get<codegen::CastSpec>(codegen::parse_kernel_spec(key).value()));
    }
  }
  return out;
}
class DelayedCastTest : public CastTest {};
INSTANTIATE_TEST_SUITE_P(Specs, DelayedCastTest, ::testing::ValuesIn(delayed_specs()), cast_name);
class ListCastTest : public CastTest {};
INSTANTIATE_TEST_SUITE_P(Specs, ListCastTest, ::testing::ValuesIn(specs_with(may_be_a_list)),
                         cast_name);

TEST_P(CastTest, BitwiseLikeTheReference) {
  for (const int64_t rows : {1, 17, 1000, 4095}) {
    for (const int64_t cols : {16, 48, 2064}) {
      for (const Data data : {Data::kOutliers, Data::kTiny, Data::kNonFinite, Data::kHuge}) {
        // The reference takes its time: special values and single copies on the smaller ones.
        const bool large = rows * cols > 200'000;
        if (large && (data != Data::kOutliers || !GetParam().q || !GetParam().qt)) continue;
        const uint64_t seed = static_cast<uint64_t>(rows * 10000 + cols);
        SCOPED_TRACE(f8::format("{} rows {} cols {} data {} seed {}", codegen::key(GetParam()),
                                rows, cols, static_cast<int>(data), seed));
        const auto x = make_data(data, rows, cols, seed);
        const CastResult device(context(), GetParam(), x);
        run({&device.operand, 1});
        expect_like_reference(GetParam(), x, device);
        if (HasFailure()) return;
      }
    }
  }
}

// A scale from earlier steps knows nothing of an infinity, which is to show all the same; tiles
// without one are as ever.
TEST_P(DelayedCastTest, InfinitiesBecomeNanOrSaturate) {
  auto x = reference::rounded_to(reference::random_matrix(300, 272, 3), GetParam().in);
  x.values[0] = x.values.back() = std::numeric_limits<float>::infinity();
  x.values[170 * 272 + 5] = -std::numeric_limits<float>::infinity();
  x.values[170 * 272 + 6] = std::numeric_limits<float>::quiet_NaN();
  const CastResult device(context(), GetParam(), x);
  run({&device.operand, 1});
  expect_like_reference(GetParam(), x, device);
}

// Rows that one warp has, that a block has, and that do not fit a block at once.
TEST_P(RowsCastTest, RowsOfAnyLength) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{33, 1024},
                                   {35, 1040},
                                   {19, 2048},
                                   {9, 4112},
                                   {3, 8192},
                                   {5, 16384},
                                   {3, 16400},
                                   {2, 40016}}) {
    SCOPED_TRACE(f8::format("{} rows {} cols {}", codegen::key(GetParam()), rows, cols));
    for (const Data data : {Data::kOutliers, Data::kNonFinite}) {
      const auto x = make_data(data, rows, cols, 7);
      const CastResult device(context(), GetParam(), x);
      run({&device.operand, 1});
      expect_like_reference(GetParam(), x, device);
    }
  }
}

TEST_P(CastTest, TwoMatricesInOneLaunch) {
  const auto x = make_data(Data::kOutliers, 300, 144, 1);
  const auto w = make_data(Data::kHuge, 129, 272, 2);
  const CastResult first(context(), GetParam(), x);
  const CastResult second(context(), GetParam(), w);
  const QuantizeOperand operands[] = {first.operand, second.operand};
  run(operands);
  {
    SCOPED_TRACE("first");
    expect_like_reference(GetParam(), x, first);
  }
  SCOPED_TRACE("second");
  expect_like_reference(GetParam(), w, second);
}

// Per-tile amax partials and amax words give the same bits: two matrices in a launch, one of them
// or both with partials; the last pair has the most tiles that partials are taken for. Launches
// follow one another without a pause, so that an early start of the next one would show.
TEST_P(TileAmaxCastTest, ByLinesTheSameAsByWords) {
  const auto before = amax_before(GetParam());
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 16},
                                   {300, 144},
                                   {129, 4112},
                                   {1000, 2064},
                                   {79 * 128 - 1, 112},
                                   {200, 78 * 128 - 16}}) {
    SCOPED_TRACE(f8::format("{} rows {} cols {}", codegen::key(GetParam()), rows, cols));
    ASSERT_TRUE(fits_tile_amax(*before, rows, cols));
    const bool tiny = rows * cols < 200'000;
    const auto x = make_data(tiny ? Data::kNonFinite : Data::kOutliers, rows, cols, 1);
    const auto w = make_data(Data::kTiny, 257, 272, 2);
    const CastResult x_amax(context(), GetParam(), x);
    const CastResult w_amax(context(), GetParam(), w);
    const QuantizeOperand by_words[] = {x_amax.operand, w_amax.operand};
    run(by_words);
    const DeviceBuffer x_tile_amax(context(), tile_amax_bytes(*before, rows, cols));
    const DeviceBuffer w_tile_amax(context(), tile_amax_bytes(*before, 257, 272));
    for (const bool both : {true, false}) {
      const CastResult x_by_tile_amax(context(), GetParam(), x);
      const CastResult w_second(context(), GetParam(), w);
      QuantizeOperand by_tile_amax[] = {x_by_tile_amax.operand, w_second.operand};
      by_tile_amax[0].tile_amax = x_tile_amax.as<uint16_t>();
      if (both) by_tile_amax[1].tile_amax = w_tile_amax.as<uint16_t>();
      for (int round = 0; round < 3; ++round) run(by_tile_amax);
      for (const auto& [tiled, words] :
           {std::pair{&x_by_tile_amax, &x_amax}, std::pair{&w_second, &w_amax}}) {
        const auto same = [&](const DeviceBuffer CastResult::*buffer, const char* what) {
          EXPECT_TRUE((tiled->*buffer).download<uint8_t>() == (words->*buffer).download<uint8_t>())
              << what << (words == &x_amax ? " of x" : " of w");
          EXPECT_TRUE((tiled->*buffer).guards_are_whole()) << what;
        };
        same(&CastResult::q, "q");
        same(&CastResult::qt, "qt");
        same(&CastResult::inv_row, "inv_row");
        same(&CastResult::inv_col, "inv_col");
      }
      for (const auto words = x_by_tile_amax.row_amax.download<uint32_t>();
           const uint32_t word : words)
        ASSERT_EQ(word, 0U) << "a word was raised";
    }
    EXPECT_TRUE(x_tile_amax.guards_are_whole());
    EXPECT_TRUE(w_tile_amax.guards_are_whole());
    if (HasFailure()) return;
  }
}

// There are so many tiles that blocks have two, side by side or one above the other, and at odd
// ends one; row and column amaxes are read by every block or gathered. The bits are those of two
// launches. Launches follow one another without a pause, so that a word of the launch before would
// show.
TEST_P(TilesCastTest, TwoTilesOfABlock) {
  using Size = std::pair<int64_t, int64_t>;
  int ran = 0;
  for (const std::vector<Size>& sizes : {std::vector<Size>{{1, 70'000}},
                                         {{70'000, 16}},
                                         {{1921, 4624}},
                                         {{4624, 1920}},
                                         {{3968, 4000}},
                                         {{4000, 3968}},
                                         {{1, 16}, {3000, 3008}, {129, 272}, {260, 400}}}) {
    SCOPED_TRACE(f8::format("{} of {} x {} and {} more", codegen::key(GetParam()), sizes[0].first,
                            sizes[0].second, sizes.size() - 1));
    std::vector<std::unique_ptr<CastResult>> one;
    std::vector<std::unique_ptr<CastResult>> two;
    std::vector<QuantizeOperand> by_one;
    std::vector<QuantizeOperand> by_two;
    int64_t tiles = 0;
    for (const auto& [rows, cols] : sizes) {
      const auto x = make_data(Data::kOutliers, rows, cols, static_cast<uint64_t>(rows));
      for (auto [devices, operands] : {std::pair{&one, &by_one}, std::pair{&two, &by_two}}) {
        devices->push_back(std::make_unique<CastResult>(context(), GetParam(), x));
        operands->push_back(devices->back()->operand);
      }
      tiles += cast_tiles(rows, cols);
    }
    const int sm_count = context().device().sm_count;
    ASSERT_GT(tiles, resident_quantize_blocks(132));
    // Axis scales: no more than 256 rows and columns of tiles; a smaller device: fewer tiles.
    if (quantize_launches(GetParam(), sm_count, by_one) != Launches::kOne) continue;
    ++ran;
    for (int round = 0; round < 3; ++round) run(by_one);
    codegen::CastSpec apart = GetParam();
    apart.one_launch = false;
    const auto before = amax_before(apart);
    const auto amax = context().kernel(before.value());
    const auto cast = context().kernel(apart);
    F8_ASSERT_OK(amax);
    F8_ASSERT_OK(cast);
    F8_ASSERT_OK(
        launch_amax(driver(), **amax, amax_args(*before, sm_count, by_two), true, nullptr));
    F8_ASSERT_OK(launch_cast(driver(), **cast, cast_args(apart, sm_count, by_two), true, nullptr));
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (const auto& [buffer, what] : {std::pair{&CastResult::q, "q"},
                                         {&CastResult::qt, "qt"},
                                         {&CastResult::scale, "scale"},
                                         {&CastResult::recorded, "recorded amax"},
                                         {&CastResult::inv_row, "inv_row"},
                                         {&CastResult::inv_col, "inv_col"}}) {
        const DeviceBuffer& got = (*one[i]).*buffer;
        EXPECT_TRUE(got.download<uint8_t>() == ((*two[i]).*buffer).download<uint8_t>())
            << what << " of " << i;
        EXPECT_TRUE(got.guards_are_whole()) << what << " of " << i;
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_TRUE(ran > 0 || context().device().sm_count < 132);
  if (ran == 0) GTEST_SKIP() << "a device with too few SMs";
}

// More matrices than one launch takes, of all sizes, in one list: launches one after another
// without a pause, so that an early start of the next one could show.
TEST_P(ListCastTest, AListOfMatrices) {
  std::vector<MatrixSize> sizes;
  std::vector<reference::Matrix> matrices;
  std::vector<std::unique_ptr<CastResult>> devices;
  std::vector<QuantizeOperand> operands;
  for (int64_t i = 0; i < 65; ++i) {
    sizes.push_back({1 + i * 97 % 400, 16 * (1 + i * 5 % 31)});
    if (i == 40) sizes.back() = {1000, 2064};
    const auto [rows, cols] = sizes.back();
    matrices.push_back(make_data(i % 7 == 3 ? Data::kTiny : Data::kOutliers, rows, cols,
                                 static_cast<uint64_t>(i)));
    devices.push_back(std::make_unique<CastResult>(context(), GetParam(), matrices.back()));
    operands.push_back(devices.back()->operand);
  }
  const auto list = QuantizeList::plan(context_, GetParam(), sizes);
  F8_ASSERT_OK(list);
  const DeviceBuffer workspace(context(), std::max<size_t>(list->workspace_bytes(), 16));
  for (int round = 0; round < 3; ++round) {
    F8_ASSERT_OK(list->run(operands, workspace.as(), nullptr));
  }
  EXPECT_TRUE(workspace.guards_are_whole());
  for (size_t i = 0; i < devices.size(); ++i) {
    SCOPED_TRACE(f8::format("{} matrix {}, {} x {}", codegen::key(GetParam()), i, sizes[i].rows,
                            sizes[i].cols));
    expect_like_reference(GetParam(), matrices[i], *devices[i]);
    if (HasFailure()) return;
  }
}

// A row stride above the input's width: what lies between rows is not read.
TEST_P(CastTest, StridedMatrices) {
  const int64_t rows = 150;
  const int64_t cols = 176;
  const int64_t ld = 192;
  const auto x = make_data(Data::kOutliers, rows, cols, 3);
  std::vector<uint16_t> strided(static_cast<size_t>(rows * ld), 0x7fc0);
  const auto dense = reference::to_bf16_bits(x);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(&dense[static_cast<size_t>(r * cols)], cols, &strided[static_cast<size_t>(r * ld)]);
  }
  const DeviceBuffer input(context(), strided);
  const CastResult device(context(), GetParam(), x);
  auto amax = amax_arguments({&device.operand, 1});
  amax.tensors[0].x = input.as();
  amax.tensors[0].ld = ld;
  auto cast = cast_arguments({&device.operand, 1});
  cast.tensors[0].x = input.as();
  cast.tensors[0].ld = ld;
  run(amax, cast);
  expect_like_reference(GetParam(), x, device);
}

}  // namespace
}  // namespace f8::runtime::gpu
