// The casts of groups of rows against the reference of each group alone, bit for bit: by type, scales
// and routing.
#include "recipes/reference/groups.hpp"
#include "runtime/emulation/activations.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/gemm/k_grouped.hpp"
#include "tests/gpu/experts/group_casts.hpp"
#include "tests/gpu/experts/routings.hpp"

namespace f8::runtime::gpu {
namespace {

using kernels::RowSource;
using reference::Matrix;

constexpr kernels::Activation kSilu = kernels::Activation::kSilu;
constexpr uint8_t kPoisonOfRow = 0xff;

class GroupCastTest : public GroupCasts {
 protected:
  // Where a group's part of a copy is: its bytes begin at `first` and its rows are `pitch` apart; the
  // inverse scale of block b of row r is at [r * row_step + b * block_step] from `inverse` on.
  struct Part {
    const uint8_t* first;
    int64_t pitch;
    const float* inverse;
    int64_t row_step, block_step;
  };
  static void expect_copy(const Matrix& of, const Part& part, const codegen::CastSpec& spec,
                          codegen::ScaleMode mode, const std::string& name) {
    const auto expected =
        reference::cast(of, over_of(mode), spec.out, spec.pow2,
                        spec.saturate ? NonFinite::kSaturate : NonFinite::kPropagate);
    const bool blocks = mode == codegen::ScaleMode::kBlock1x128;
    const int64_t across = blocks ? ceil_div(of.cols, kernels::kCastTile) : 1;
    for (int64_t r = 0; r < of.rows; ++r) {
      const uint8_t* const row = part.first + r * part.pitch;
      ASSERT_TRUE(std::equal(row, row + of.cols, expected.bits.begin() + r * of.cols))
          << name << ", row " << r;
      for (int64_t b = 0; b < across; ++b) {
        const size_t at =
            mode == codegen::ScaleMode::kTensor ? 0 : static_cast<size_t>(r * across + b);
        ASSERT_EQ(part.inverse[r * part.row_step + b * part.block_step], expected.inv_scales[at])
            << name << ", row " << r << ", block " << b;
      }
    }
  }
  void expect_groups(const codegen::CastSpec& spec, const Routing& routing, const Matrix& x,
                     const Copies& to);
  void cast_groups(const codegen::CastSpec& spec, const Routing& routing, int64_t cols,
                   int64_t rows);
};

INSTANTIATE_TEST_SUITE_P(
    Specs, GroupCastTest,
    ::testing::Values(
        "cast/bf16.e4m3/tensor/q/group", "cast/bf16.e5m2/tensor/q/group",
        "cast/bf16.e4m3/axis/q/group", "cast/f16.e4m3/axis/q/pow2/group",
        "cast/f32.e4m3/axis/q/pow2/group", "cast/f32.e5m2/tensor/q/hold/group",
        "cast/bf16.e5m2/tensor/q+qt/group", "cast/bf16.e4m3/axis/q+qt/pow2/group",
        "cast/f16.e4m3/axis/qt/group", "cast/bf16.e4m3/block1x128/q/pow2/group",
        "cast/bf16.e4m3/block1x128/q+qt/pow2/group", "cast/f32.e4m3/block1x128/qt/group",
        "cast/bf16.e4m3/axis/q/pow2/group/gather", "cast/bf16.e4m3/axis/qt/pow2/group/gather",
        "cast/f32.e4m3/tensor/q+qt/group/gather", "cast/bf16.e5m2/tensor/q+qt/group/gather_score",
        "cast/f16.e4m3/axis/q+qt/pow2/group/gather_score",
        "cast/f32.e4m3/block1x128/q+qt/group/gather_score",
        "cast/bf16.e4m3/axis/q/pow2/group/swiglu", "cast/bf16.e4m3/tensor/qt/group/swiglu",
        "cast/f32.e4m3/axis/q+qt/group/swiglu", "cast/f16.e4m3/block1x128/q+qt/group/swiglu",
        "cast/bf16.e4m3/axis/q+qt/pow2/group/swiglu_backward",
        "cast/bf16.e4m3/axis/q/pow2/group/swiglu_backward",
        "cast/bf16.e5m2/tensor/q+qt/group/swiglu_backward",
        "cast/f32.e4m3/tensor/q/group/swiglu_backward",
        "cast/bf16.e4m3/block1x128/q+qt/pow2/group/swiglu_backward"),
    GroupCasts::spec_name);

// The columns of a source's rows: two tiles and a part of one, and gradients in pairs of whole tiles besides.
std::vector<int64_t> columns_of(RowSource source) {
  if (source == RowSource::kSwigluBackward) return {272, 512};
  return {272};
}

// The operands of a source of rows on the device, and the rows that it gives. The operands hold NaN from
// row `used` of these on, or as the factors of these.
class SourceOfRows {
 public:
  SourceOfRows(const Context& context, RowSource source, int64_t rows, int64_t cols, int64_t used,
               Dtype type)
      : context_(context), type_(type), used_(used), cols_(cols) {
    const bool backward = source == RowSource::kSwigluBackward;
    const int64_t half = backward ? cols / 2 : cols;
    if (source == RowSource::kMatrix) {
      rows_ = upload(x_, random(rows, cols, 7), used);
    } else if (source == RowSource::kSwiglu || backward) {
      const Matrix gate = upload(x_, random(rows, half, 7), used);
      const Matrix up = upload(up_, random(rows, half, 8), used);
      const Matrix grad = upload(grad_, random(rows, half, 9), used);
      rows_ = rounded(rows, [&](int64_t r, int64_t c) {
        const auto at = static_cast<size_t>(r * half + c % half);
        if (!backward) return emulation::glu(kSilu, gate.values[at], up.values[at], type);
        const auto both =
            emulation::glu_backward(kSilu, gate.values[at], up.values[at], grad.values[at], type);
        return c < half ? both.gate : both.up;
      });
      ld_ = half;
    } else {
      gather(rows, source == RowSource::kGatherScore);
    }
  }
  [[nodiscard]] const Matrix& rows() const { return rows_; }
  void give(GroupCastCall& call) const {
    const auto at = [](const auto& buffer) { return buffer ? buffer->as() : nullptr; };
    call.x = at(x_);
    call.ld = ld_;
    call.source = {.index = static_cast<const int32_t*>(at(index_)),
                   .score = static_cast<const float*>(at(score_)),
                   .up = at(up_),
                   .grad = at(grad_),
                   .ld_up = ld_,
                   .ld_grad = ld_,
                   .half_rows = 0,
                   .padding = 0};
  }

 private:
  [[nodiscard]] Matrix random(int64_t rows, int64_t cols, uint64_t seed) const {
    return reference::rounded_to(
        reference::random_matrix(rows, cols, seed, reference::Distribution::kOutliers), type_);
  }
  template <class Value>
  [[nodiscard]] Matrix rounded(int64_t rows, const Value& value) const {
    Matrix made{rows, cols_, {}};
    for (int64_t i = 0; i < rows * cols_; ++i) made.values.push_back(value(i / cols_, i % cols_));
    return reference::rounded_to(made, type_);
  }
  Matrix upload(std::optional<DeviceBuffer>& to, Matrix x, int64_t used) const {
    std::vector<uint8_t> bytes = reference::to_bytes(x, type_);
    const size_t row_bytes = static_cast<size_t>(x.cols) * size_bytes(type_);
    std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(used) * row_bytes),
              bytes.end(), kPoisonOfRow);
    to.emplace(context_, bytes);
    return x;
  }
  // Rows of half as many tokens; that which no group has is NaN.
  void gather(int64_t rows, bool scores) {
    const int64_t tokens = rows / 2 + 1;
    const Matrix x = upload(x_, random(tokens + 1, cols_, 7), tokens);
    std::vector<int32_t> index;
    std::vector<float> score;
    const Matrix factors = random(rows, 1, 8);
    for (int64_t r = 0; r < rows; ++r) {
      index.push_back(static_cast<int32_t>(r < used_ ? r * 7919 % tokens : tokens));
      score.push_back(scores ? factors.values[static_cast<size_t>(r)] : 1.0F);
    }
    index_.emplace(context_, index);
    score_.emplace(context_, score);
    rows_ = rounded(rows, [&](int64_t r, int64_t c) {
      const auto at = static_cast<size_t>(r);
      return x.values[static_cast<size_t>(index[at] * cols_ + c)] * score[at];
    });
  }

  const Context& context_;
  Dtype type_;
  int64_t used_, cols_, ld_ = 0;
  Matrix rows_;
  std::optional<DeviceBuffer> x_, up_, grad_, index_, score_;
};

// Compares the copies of each group with the reference's.
void GroupCastTest::expect_groups(const codegen::CastSpec& spec, const Routing& routing,
                                  const Matrix& x, const Copies& to) {
  const int64_t cols = x.cols;
  const auto experts = static_cast<int64_t>(routing.ends.size());
  const int64_t columns = columns_of_groups(routing.m, experts);
  const int64_t scale_rows = scale_rows_of_groups(routing.m, experts);
  const auto q = to.q.download<uint8_t>(), qt = to.qt.download<uint8_t>();
  const auto scale = to.scale.download<float>();
  const auto inv_row = to.inv_row.download<float>(), inv_col = to.inv_col.download<float>();
  const reference::Groups groups = reference::groups(routing.ends, routing.m);
  // A copy of a group, whose inverse scales of axes begin at `axis`, of blocks at `block`.
  const auto part = [&](codegen::ScaleMode mode, const uint8_t* first, int64_t pitch, size_t e,
                        const float* inverse, int64_t axis, int64_t block, int64_t block_step) {
    if (mode == codegen::ScaleMode::kTensor) {
      return Part{first, pitch, &scale[e * kernels::kScaleStride + kernels::kInverse], 0, 0};
    }
    const bool blocks = mode == codegen::ScaleMode::kBlock1x128;
    return Part{first, pitch, inverse + (blocks ? block : axis), 1, block_step};
  };
  for (size_t e = 0; e < groups.lengths.size(); ++e) {
    const int64_t rows = groups.lengths[e], start = groups.starts[e], block = groups.blocks[e];
    if (rows == 0) continue;
    const std::string name = f8::format("{}, expert {}", routing.name, e);
    const Matrix own = rows_of(x, start, rows);
    if (spec.q) {
      expect_copy(own,
                  part(spec.scale_q, q.data() + start * row_pitch(cols), row_pitch(cols), e,
                       inv_row.data(), start, groups.scales[e], scale_rows),
                  spec, spec.scale_q, name + ", q");
    }
    if (spec.qt) {
      const int64_t step = kernels::padded_scales(cols);
      const uint8_t* const first = qt.data() + block * kernels::kCastTile;
      expect_copy(transpose(own),
                  part(spec.scale_qt, first, columns, e, inv_col.data(),
                       static_cast<int64_t>(e) * cols, block * step, step),
                  spec, spec.scale_qt, name + ", qt");
      for (int64_t c = 0; c < cols; ++c) {
        const uint8_t* const row = first + c * columns;
        ASSERT_TRUE(std::all_of(row + rows, row + row_pitch(rows), [](uint8_t b) {
          return b == 0;
        })) << name;
      }
    }
    if (HasFatalFailure()) return;
  }
  const auto tail = q.begin() + groups.rows * row_pitch(cols);
  EXPECT_TRUE(std::all_of(tail, q.end(), [](uint8_t b) { return b == kPoison; })) << routing.name;
  const int64_t used = row_pitch(groups.lengths.back()) + groups.blocks.back() * int64_t{128};
  EXPECT_TRUE(std::all_of(qt.begin() + used, qt.begin() + columns, [](uint8_t b) {
    return b == kPoison;
  })) << routing.name;
  EXPECT_TRUE(to.guards_are_whole()) << routing.name;
}

// The copies of a routing's groups, by kernels for groups of so many rows on the average.
void GroupCastTest::cast_groups(const codegen::CastSpec& spec, const Routing& routing, int64_t cols,
                                int64_t rows) {
  const auto experts = static_cast<int64_t>(routing.ends.size());
  const int64_t columns = columns_of_groups(routing.m, experts);
  const SourceOfRows source(context(), spec.source, routing.m, cols, routing.ends.back(), spec.in);
  const auto layouts = GroupLayoutPlan::create(context_, routing.m, experts);
  F8_ASSERT_OK(layouts);
  const DeviceBuffer layout(context(), std::vector<uint8_t>(layouts->bytes()));
  const DeviceBuffer offsets(context(), routing.ends);
  const auto plan = GroupCastPlan::create(context_, spec, rows, cols);
  F8_ASSERT_OK(plan);
  const Copies to(context(), *plan, routing.m, cols, experts, cols, columns);
  F8_ASSERT_OK(layouts->run(
      {.offsets = offsets.as<int32_t>(), .m = routing.m, .layout = {layout.as()}}, nullptr));
  const kernels::GroupsOf of{.words = layout.as<int32_t>(),
                             .layout = group_layout_of(routing.m, experts).value(),
                             .count = 0,
                             .rows = 0};
  GroupCastCall call = call_of(of, routing.m, to);
  source.give(call);
  call.ld_qt = columns;
  call.scale_rows = scale_rows_of_groups(routing.m, experts);
  F8_ASSERT_OK(plan->run(call, nullptr));
  expect_groups(spec, routing, source.rows(), to);
}

// The tail holds NaN, which reaches no scale, and its rows are not written. Behind a group's columns of
// qt there are zeros up to a whole block, and what is behind the last block is not written.
TEST_P(GroupCastTest, IsTheCastOfEachGroupAlone) {
  const codegen::CastSpec spec = spec_of(GetParam());
  for (const Routing& routing : routings(by_device(1024, 128))) {
    if (routing.m == 0) continue;
    for (const int64_t cols : columns_of(spec.source)) {
      for (const int64_t rows : {kSmallGroups, kLargeGroups}) {
        cast_groups(spec, routing, cols, rows);
        if (HasFailure()) return;
      }
    }
  }
}

// A group, or a column of its tiles, has more of these than the blocks on the device hold: they leave tiles
// and read them again.
class LargeGroupTest : public GroupCastTest {};
INSTANTIATE_TEST_SUITE_P(Specs, LargeGroupTest,
                         ::testing::Values("cast/bf16.e4m3/axis/q+qt/pow2/group",
                                           "cast/bf16.e5m2/tensor/q+qt/group/gather_score",
                                           "cast/bf16.e4m3/axis/q+qt/pow2/group/swiglu_backward",
                                           "cast/f16.e4m3/axis/qt/group"),
                         GroupCasts::spec_name);

TEST_P(LargeGroupTest, IsTheCastOfTheGroupAlone) {
  const codegen::CastSpec spec = spec_of(GetParam());
  const int32_t held = context().device().sm_count * codegen::quantize_tiles_per_sm(spec);
  const bool one_across =
      codegen::scales_columns_alone(spec) || spec.source == RowSource::kSwigluBackward;
  const int32_t tiles = by_device(one_across ? held + 70 : held / 2 + 70, 3);
  cast_groups(spec, routing_of("a large group", {130, tiles * 128 + 3, 77, 300}, 5), 256,
              kSmallGroups);
}

}  // namespace
}  // namespace f8::runtime::gpu
