// The amaxes of rows and columns reach the cast as per-tile partials, in an amax buffer that is
// raised atomically, or within one launch. The tests say which of them a matrix takes and the room
// for it, and that each gives the same bits.
#include <algorithm>
#include <cstring>

#include "runtime/linear/plan/kernels.hpp"
#include "runtime/linear/plan/layout.hpp"
#include "runtime/quantize/quantize.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::describe;
using testing::FakeCuda;
using testing::Fixture;

codegen::CastSpec spec_of(const std::string& key) {
  return std::get<codegen::CastSpec>(codegen::parse_kernel_spec(key).value());
}
codegen::AmaxSpec amax_of(const std::string& key) {
  return std::get<codegen::AmaxSpec>(codegen::parse_kernel_spec(key).value());
}

// 132 SMs: 528 blocks. Two tiles of a block are neighbours along the longer side.
TEST(QuantizeLaunches, OneTakesOneTileOrTwoABlock) {
  const codegen::CastSpec tensor{.one_launch = true};
  codegen::CastSpec axis = tensor;
  axis.scale_q = axis.scale_qt = codegen::ScaleMode::kAxis;
  const auto fits = [](const codegen::CastSpec& spec, int64_t down, int64_t across) {
    const QuantizeOperand x{.rows = down * 128, .cols = across * 128};
    return quantize_launches(spec, 132, {&x, 1}) == Launches::kOne;
  };
  EXPECT_TRUE(fits(tensor, 1, 528) && fits(tensor, 32, 32) && fits(tensor, 44, 24));
  EXPECT_TRUE(fits(tensor, 1, 529) && fits(tensor, 72, 11) && fits(tensor, 1, 1056));
  EXPECT_FALSE(fits(tensor, 1, 1057) || fits(tensor, 1057, 1) || fits(tensor, 33, 32));
  EXPECT_TRUE(fits(axis, 252, 4) && fits(axis, 32, 32));
  EXPECT_FALSE(fits(axis, 253, 4) || fits(axis, 1, 256));  // 256 rows and columns of tiles
}

TEST(QuantizeLaunches, OneEachWhereTheyDoNotFitTogether) {
  const codegen::CastSpec tensor{.one_launch = true};
  codegen::CastSpec axis = tensor;
  axis.scale_q = axis.scale_qt = codegen::ScaleMode::kAxis;
  for (const codegen::CastSpec& spec : {tensor, axis}) {
    const auto launches = [&](int64_t tiles, int64_t more) {
      const QuantizeOperand both[] = {{.rows = tiles * 8, .cols = 2048},
                                      {.rows = more * 8, .cols = 2048}};
      return quantize_launches(spec, 132, both);
    };
    EXPECT_EQ(launches(400, 128), Launches::kOne);
    EXPECT_EQ(launches(512, 64), Launches::kOne);
    EXPECT_EQ(launches(1024, 32), Launches::kOne);
    EXPECT_EQ(launches(1024, 64), Launches::kOneEach);
    EXPECT_EQ(launches(528, 528), Launches::kOneEach) << "33 rows of tiles are 17 pairs";
    EXPECT_EQ(launches(1024, 1024), Launches::kOneEach);
    EXPECT_EQ(launches(1024, 1072), Launches::kTwo);
  }
}

TEST(TakesLines, UpTo80TilesInARowAndAColumnOfTiles) {
  for (const char* key : {"amax/bf16/row", "amax/bf16/col", "amax/f16/rowcol"}) {
    const codegen::AmaxSpec spec = amax_of(key);
    EXPECT_TRUE(fits_tile_amax(spec, 1, 16));
    EXPECT_TRUE(fits_tile_amax(spec, 79 * 128, 128));
    EXPECT_FALSE(fits_tile_amax(spec, 79 * 128 + 1, 128));
    EXPECT_TRUE(fits_tile_amax(spec, 64 * 128, 16 * 128));
    EXPECT_FALSE(fits_tile_amax(spec, 64 * 128, 16 * 128 + 16));
  }
  for (const char* key : {"amax/f32/rowcol", "amax/bf16/tensor", "amax/bf16/rowcol+tensor"}) {
    EXPECT_FALSE(fits_tile_amax(amax_of(key), 1, 16)) << key;
    EXPECT_EQ(tile_amax_bytes(amax_of(key), 1, 16), 0U) << key;
  }
}

TEST(TakesLines, ThereIsRoomForEveryNumberOfRowsUpToThePlanned) {
  const codegen::AmaxSpec spec = amax_of("amax/bf16/rowcol");
  for (const int64_t cols : {16, 128, 4096, 79 * 128, 79 * 128 + 16, 80 * 128, 30000}) {
    for (const int64_t planned : {1, 128, 129, 4096, 8192, 8193, 20000}) {
      size_t most = 0;
      for (int64_t rows = 1; rows <= planned; ++rows) {
        if (!fits_tile_amax(spec, rows, cols)) break;
        most = static_cast<size_t>(cast_tiles(rows, cols)) * 512;
      }
      EXPECT_EQ(tile_amax_bytes(spec, planned, cols), most) << planned << " x " << cols;
    }
  }
}

// A matrix, the buffers that a cast writes for it, and poisoned buffers for its amaxes.
struct TileItem {
  TileItem(const codegen::CastSpec& spec, int64_t rows, int64_t cols, uint64_t seed)
      : matrix(reference::random_matrix(rows, cols, seed)),
        x(matrix),
        q(fp8_copy_bytes(rows, cols)),
        qt(fp8_copy_bytes(cols, rows)),
        scale(32),
        inv_row(static_cast<size_t>(scale_floats(spec.scale_q, rows, cols)) * 4),
        inv_col(static_cast<size_t>(scale_floats(spec.scale_qt, cols, rows)) * 4),
        tile_amax(tile_amax_bytes(*amax_before(spec), rows, cols)),
        words(static_cast<size_t>(rows + cols) * 4) {}

  [[nodiscard]] QuantizeOperand operand(bool by_tile_amax) {
    auto* rows = reinterpret_cast<uint32_t*>(words.data());
    if (!by_tile_amax) std::memset(rows, 0, words.bytes());
    return {.x = x.data(),
            .rows = matrix.rows,
            .cols = matrix.cols,
            .tile_amax = by_tile_amax ? reinterpret_cast<uint16_t*>(tile_amax.data()) : nullptr,
            .row_amax = rows,
            .col_amax = rows + matrix.rows,
            .q = q.data(),
            .qt = qt.data(),
            .scale = reinterpret_cast<float*>(scale.data()),
            .inv_row = reinterpret_cast<float*>(inv_row.data()),
            .inv_col = reinterpret_cast<float*>(inv_col.data()),
            .delayed = &delayed};
  }
  [[nodiscard]] auto written() {
    const auto copy = [](Buffer& b) {
      return std::vector<uint8_t>(b.data(), b.data() + b.bytes());
    };
    return std::tuple(copy(q), copy(qt), copy(inv_row), copy(inv_col));
  }
  [[nodiscard]] bool guards_are_whole() {
    const auto buffers = {&q, &qt, &inv_row, &inv_col, &tile_amax, &words};
    return std::ranges::all_of(buffers, [](Buffer* b) { return b->guard_is_whole(); });
  }

  reference::Matrix matrix;
  Buffer x, q, qt, scale, inv_row, inv_col, tile_amax, words;
  float delayed = 96;
};

class QuantizeTileAmaxTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ASSERT_TRUE(context_->make_current()); }
  using Pair = std::array<std::unique_ptr<TileItem>, 2>;
  Pair pair() {
    return {std::make_unique<TileItem>(spec_, 300, 272, 1),
            std::make_unique<TileItem>(spec_, 129, 400, 2)};
  }
  void two_launches(Pair& items, bool first_by_tile_amax, bool second_by_tile_amax) {
    const QuantizeOperand operands[] = {items[0]->operand(first_by_tile_amax),
                                        items[1]->operand(second_by_tile_amax)};
    const auto amax = amax_before(spec_).value();
    const Driver& driver = context_->state().driver;
    ASSERT_TRUE(launch_amax(driver, *context_->kernel(amax).value(), amax_args(amax, 132, operands),
                            true, nullptr));
    ASSERT_TRUE(launch_cast(driver, *context_->kernel(spec_).value(),
                            cast_args(spec_, 132, operands), true, nullptr));
    for (size_t i = 0; i < items.size(); ++i) {
      const bool by_tile_amax = i == 0 ? first_by_tile_amax : second_by_tile_amax;
      EXPECT_EQ(items[i]->words.untouched(), by_tile_amax);
      EXPECT_EQ(items[i]->tile_amax.untouched(), !by_tile_amax);
      EXPECT_TRUE(items[i]->guards_are_whole());
    }
    ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }
  codegen::CastSpec spec_ = spec_of(GetParam());
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
};
INSTANTIATE_TEST_SUITE_P(Specs, QuantizeTileAmaxTest,
                         ::testing::Values("cast/bf16.e4m3/axis/q+qt", "cast/bf16.e4m3/axis/q",
                                           "cast/bf16.e5m2/axis/qt/pow2",
                                           "cast/bf16.e4m3/axis+delayed/q+qt",
                                           "cast/bf16.e4m3/block1x128+axis/q+qt"));

TEST_P(QuantizeTileAmaxTest, TheSameBitsByEachWay) {
  Pair words = pair();
  two_launches(words, false, false);
  for (const auto& [first, second] : {std::pair{true, true}, {true, false}, {false, true}}) {
    Pair tile_amax = pair();
    two_launches(tile_amax, first, second);
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(tile_amax[i]->written(), words[i]->written()) << i;
  }
  codegen::CastSpec one_launch = spec_;
  one_launch.one_launch = true;
  if (!codegen::can_be_one_launch(spec_)) return;
  Pair together = pair();
  const QuantizeOperand operands[] = {together[0]->operand(true), together[1]->operand(false)};
  ASSERT_EQ(quantize_launches(one_launch, 132, operands), Launches::kOne);
  Buffer sync(quantize_sync_bytes(132));
  ASSERT_TRUE(launch_quantize(context_->state().driver, *context_->kernel(one_launch).value(),
                              quantize_args(one_launch, 132, operands, sync.data()), true,
                              nullptr));
  ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(together[i]->written(), words[i]->written()) << i;
}

// A tensor's amax is recorded with an amax buffer alone.
TEST(QuantizeArgs, TileAmaxesAndPartialsAreNeverTakenForEachOther) {
  uint16_t tile_amax = 0;
  uint32_t partials = 0;
  const QuantizeOperand operand{
      .rows = 16, .cols = 16, .partials = &partials, .tile_amax = &tile_amax};
  const auto cast = [&](const char* key) {
    return cast_args(spec_of(key), 132, {&operand, 1}).tensors[0];
  };
  EXPECT_EQ(cast("cast/bf16.e4m3/axis/q").tile_amax, &tile_amax);
  EXPECT_EQ(cast("cast/bf16.e4m3/axis+tensor/q+qt").partials, &partials);
  EXPECT_EQ(cast("cast/bf16.e4m3/tensor/q").partials, &partials);
}

struct Names {
  std::vector<std::string> forward, backward;
};

Names step_names(Fixture& s) {
  Names names;
  for (const Step& step : s.linear->forward_steps(s.forward())) names.forward.push_back(step.name);
  for (const Step& step : s.linear->backward_steps(s.backward()))
    names.backward.push_back(step.name);
  return names;
}

// The planned m has 82 tiles in a row and a column, so it takes an amax buffer. Some fewer rows
// have 80, so they take per-tile partials, which need more room than the planned m does. The weight
// takes partials while the input takes an amax buffer.
TEST(LinearTileAmax, FewerRowsThanPlannedAcrossTheLimit) {
  FakeCuda cuda;
  cuda.cooperative = false;
  using Steps = std::vector<std::string>;
  for (const int64_t m : {81 * 128, 79 * 128 + 1, 79 * 128, 33 * 128}) {
    SCOPED_TRACE(m);
    const bool tile_amax = m <= 79 * 128;
    Fixture s(cuda, describe("rowwise", {81 * 128, 16, 32}), m);
    const Names names = step_names(s);
    if (tile_amax) {
      EXPECT_EQ(names.forward, (Steps{"amax x,w", "cast x,w", "gemm output"}));
      EXPECT_EQ(names.backward,
                (Steps{"amax dy", "cast dy", "gemm grad_input", "gemm grad_weight"}));
    } else {
      EXPECT_EQ(names.forward, (Steps{"clear amax", "amax x,w", "cast x,w", "gemm output"}));
      EXPECT_EQ(names.backward,
                (Steps{"clear amax", "amax dy", "cast dy", "gemm grad_input", "gemm grad_weight"}));
    }
    const int clears = cuda.memsets;
    ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
    std::memset(s.workspace.data(), testing::kPoison, s.workspace.bytes());
    ASSERT_TRUE(s.linear->backward(s.backward(), nullptr));
    EXPECT_EQ(cuda.memsets - clears, tile_amax ? 0 : 2);
    ASSERT_TRUE(cuda.faults.empty()) << cuda.faults.front();
    EXPECT_TRUE(s.guards_are_whole());
    const auto expected = s.expected();
    EXPECT_LT(reference::relative_error(expected.y, s.y.bf16()), 2.5e-3);
    EXPECT_LT(reference::relative_error(expected.dx, s.dx.bf16()), 2.5e-3);
    EXPECT_LT(reference::relative_error(expected.dw, s.dw.bf16()), 2.5e-3);
    if (tile_amax) continue;
    cuda.memset_result = CUDA_ERROR_ILLEGAL_ADDRESS;
    EXPECT_FALSE(s.linear->forward(s.forward(), nullptr));
    cuda.memset_result = CUDA_SUCCESS;
  }
}

// One launch finds a row's scale for one copy and the tensor's for the other, in an amax buffer.
TEST(LinearTileAmax, NotWithATensorsAmax) {
  FakeCuda cuda;
  cuda.cooperative = false;
  LinearDesc desc = describe("rowwise", {300, 144, 400});
  for (GemmSetting& gemm : desc.recipe.gemms) gemm.b.granularity = Granularity::kTensor;
  Fixture s(cuda, desc, 300);
  EXPECT_EQ(step_names(s).forward.front(), "clear amax");
}

// Parts of the workspace do not meet, whatever lies between them.
TEST(LinearTileAmax, LieBetweenWordsAndPartials) {
  const LinearDesc desc = describe("rowwise", {20000, 4096, 4096});
  const LinearLayout layout = linear_layout(desc.shape, linear_kernels(desc).value(), 132, 0, 0);
  constexpr size_t kMost = size_t{48} * 32 * 512;  // of x and dy, with 6144 rows
  const auto& [x, w, none] = layout.forward;
  const TensorBuffers& dy = layout.backward.dy;
  EXPECT_GE(x.tile_amax.offset(), x.row_amax.offset() + size_t{20000} * 4);
  EXPECT_EQ(x.partials.offset(), x.tile_amax.offset() + kMost);
  EXPECT_EQ(w.partials.offset(), w.tile_amax.offset() + size_t{32} * 32 * 512);
  EXPECT_EQ(dy.partials.offset(), dy.tile_amax.offset() + kMost);
  const LinearDesc tensor = describe("tensorwise", {20000, 4096, 4096});
  const LinearLayout flat = linear_layout(tensor.shape, linear_kernels(tensor).value(), 132, 0, 0);
  EXPECT_EQ(flat.forward.x.partials.offset(), flat.amax.offset());
}

}  // namespace
}  // namespace f8::runtime
