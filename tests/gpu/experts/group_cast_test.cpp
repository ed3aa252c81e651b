// The casts of groups of rows against the reference of each group alone, bit for bit: by type, scales
// and routing, and of equal groups, as the weights of experts.
#include "runtime/experts/group_cast.hpp"

#include <bit>
#include <cmath>

#include "recipes/fp8_layout.hpp"
#include "recipes/reference/groups.hpp"
#include "runtime/emulation/activations.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/gemm/k_grouped.hpp"
#include "tests/gpu/experts/routings.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

using kernels::RowSource;
using reference::AmaxOver;
using reference::Matrix;

constexpr kernels::Activation kSilu = kernels::Activation::kSilu;
constexpr uint8_t kPoisonOfRow = 0xff;

AmaxOver over_of(codegen::ScaleMode mode) {
  switch (mode) {
    case codegen::ScaleMode::kTensor:
      return AmaxOver::kTensor;
    case codegen::ScaleMode::kBlock1x128:
      return AmaxOver::kBlock1x128;
    case codegen::ScaleMode::kBlock128x128:
      return AmaxOver::kBlock128x128;
    default:
      return AmaxOver::kRow;
  }
}

Matrix rows_of(const Matrix& x, int64_t first, int64_t count) {
  Matrix out{count, x.cols, {}};
  const auto from = x.values.begin() + first * x.cols;
  out.values.assign(from, from + count * x.cols);
  return out;
}

std::string spec_name(const ::testing::TestParamInfo<const char*>& suite) {
  std::string name = suite.param;
  std::ranges::replace_if(
      name, [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

// By average groups of so many rows the casts of 16-bit elements are one launch, or two.
constexpr int64_t kSmallGroups = 128, kLargeGroups = int64_t{1} << 20;

class GroupCastTest : public GpuTestWith<const char*> {
 protected:
  static codegen::CastSpec spec_of(const char* key) {
    return std::get<codegen::CastSpec>(codegen::parse_kernel_spec(key).value());
  }

  // The buffers of a cast of `groups` groups, whose qt has rows of `columns`.
  struct Copies {
    Copies(const Context& context, const GroupCastPlan& plan, int64_t rows, int64_t cols,
           int64_t groups, int64_t qt_rows, int64_t columns)
        : q(context, fp8_copy_bytes(rows, cols)),
          qt(context, fp8_copy_bytes(qt_rows, columns)),
          scale(context, static_cast<size_t>(groups * kernels::kScaleStride) * sizeof(float)),
          // At least what scales of axes and of either block take.
          inv_row(context,
                  static_cast<size_t>(ceil_div(cols, 128) * scale_rows_of_groups(rows, groups)) *
                      sizeof(float)),
          inv_col(context,
                  static_cast<size_t>((groups + columns / 128) * kernels::padded_scales(cols)) *
                      sizeof(float)),
          words(context, plan.words(rows, groups) * sizeof(uint32_t)) {}
    DeviceBuffer q, qt, scale, inv_row, inv_col, words;

    [[nodiscard]] bool guards_are_whole() const {
      return q.guards_are_whole() && qt.guards_are_whole() && scale.guards_are_whole() &&
             inv_row.guards_are_whole() && inv_col.guards_are_whole() && words.guards_are_whole();
    }
  };
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
  static GroupCastCall call_of(const kernels::GroupsOf& groups, int64_t rows, const Copies& to) {
    return {.groups = groups,
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
    spec_name);

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
                         spec_name);

TEST_P(LargeGroupTest, IsTheCastOfTheGroupAlone) {
  const codegen::CastSpec spec = spec_of(GetParam());
  const int32_t held = context().device().sm_count * codegen::quantize_tiles_per_sm(spec);
  const bool one_across =
      codegen::scales_columns_alone(spec) || spec.source == RowSource::kSwigluBackward;
  const int32_t tiles = by_device(one_across ? held + 70 : held / 2 + 70, 3);
  cast_groups(spec, routing_of("a large group", {130, tiles * 128 + 3, 77, 300}, 5), 256,
              kSmallGroups);
}

class EqualGroupsTest : public GroupCastTest {};
INSTANTIATE_TEST_SUITE_P(Specs, EqualGroupsTest,
                         ::testing::Values("cast/bf16.e4m3/tensor/q+qt/group",
                                           "cast/bf16.e4m3/axis/q+qt/pow2/group",
                                           "cast/bf16.e4m3/axis+tensor/q+qt/pow2/group",
                                           "cast/f32.e4m3/axis/qt/pow2/group",
                                           "cast/f16.e4m3/axis/q/group",
                                           "cast/bf16.e5m2/tensor/qt/group",
                                           "cast/bf16.e4m3/block128x128/q+qt/pow2/group",
                                           "cast/bf16.e4m3/axis/q+qt/pow2/group/pair",
                                           "cast/bf16.e4m3/axis/q/pow2/group/pair",
                                           "cast/f32.e4m3/tensor/q+qt/group/pair",
                                           "cast/bf16.e4m3/block128x128/q+qt/pow2/group/pair"),
                         spec_name);

// A pair has the first half of each weight's rows in one tensor and the others in a second one.
TEST_P(EqualGroupsTest, AreTheCastsOfEachWeight) {
  const codegen::CastSpec spec = spec_of(GetParam());
  constexpr int64_t kExperts = 5, kN = 144, kK = 272;
  const Matrix w = reference::rounded_to(
      reference::random_matrix(kExperts * kN, kK, 8, reference::Distribution::kOutliers), spec.in);
  const bool pair = spec.source == RowSource::kPair;
  const std::vector<uint8_t> bytes = reference::to_bytes(w, spec.in);
  const auto half = [&](int64_t which) {
    const auto size = static_cast<std::ptrdiff_t>(bytes.size()) / kExperts / 2;
    std::vector<uint8_t> out;
    for (int64_t e = 0; e < kExperts; ++e) {
      const auto from = bytes.begin() + (2 * e + which) * size;
      out.insert(out.end(), from, from + size);
    }
    return out;
  };
  const DeviceBuffer device_w(context(), pair ? half(0) : bytes);
  const DeviceBuffer second_w(context(), half(1));
  for (const int64_t rows : {kSmallGroups, kLargeGroups}) {
    const auto plan = GroupCastPlan::create(context_, spec, rows, kK);
    F8_ASSERT_OK(plan);
    const Copies to(context(), *plan, kExperts * kN, kK, kExperts, kExperts * kK, kN);
    const kernels::GroupsOf groups{.words = nullptr, .layout = {}, .count = kExperts, .rows = kN};
    GroupCastCall call = call_of(groups, kExperts * kN, to);
    call.x = device_w.as();
    if (pair) {
      call.source.up = second_w.as();
      call.source.ld_up = kK;
      call.source.half_rows = kN / 2;
    }
    F8_ASSERT_OK(plan->run(call, nullptr));
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
          if (mode == codegen::ScaleMode::kBlock128x128) {
            const int64_t blocks = ceil_div(of.cols, 128);
            for (int64_t b = 0; b < blocks; ++b) {
              ASSERT_EQ(inverses[static_cast<size_t>(e * kernels::scales_2d(of.rows, of.cols) +
                                                     r / 128 * kernels::padded_scales(blocks) + b)],
                        expected.inv_scales[static_cast<size_t>(r / 128 * blocks + b)]);
            }
          }
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
}

class RaisedMaximaTest : public GroupCastTest {
 protected:
  static constexpr int64_t kGroups = 3, kRows = 150, kCols = 272, kPart = 144;
  static Matrix last_columns(const Matrix& x) {
    Matrix out{x.rows, kPart, {}};
    for (int64_t r = 0; r < x.rows; ++r) {
      const auto end = x.values.begin() + (r + 1) * x.cols;
      out.values.insert(out.values.end(), end - kPart, end);
    }
    return out;
  }
  static std::vector<uint32_t> maxima_of(const Matrix& x, int64_t rows) {
    std::vector<uint32_t> words(static_cast<size_t>(x.rows / rows));
    for (int64_t i = 0; i < x.rows * x.cols; ++i) {
      uint32_t& word = words[static_cast<size_t>(i / x.cols / rows)];
      word = std::max(word, std::bit_cast<uint32_t>(std::abs(x.values[static_cast<size_t>(i)])));
    }
    return words;
  }
};
INSTANTIATE_TEST_SUITE_P(Specs, RaisedMaximaTest,
                         ::testing::Values("cast/bf16.e4m3/axis/q/group",
                                           "cast/bf16.e4m3/axis/q+qt/pow2/group",
                                           "cast/bf16.e4m3/tensor/q+qt/group",
                                           "cast/f32.e4m3/axis/q+qt/pow2/group",
                                           "cast/f32.e5m2/tensor/q/hold/group"),
                         spec_name);

// A rank has these columns of a matrix that ranks share, with the maxima of the whole.
TEST_P(RaisedMaximaTest, GiveThePartOfTheWholesCast) {
  const codegen::CastSpec spec = spec_of(GetParam());
  const Matrix whole = reference::rounded_to(
      reference::random_matrix(kGroups * kRows, kCols, 8, reference::Distribution::kOutliers),
      spec.in);
  const Matrix part = last_columns(whole);
  const DeviceBuffer of_groups(context(), maxima_of(whole, kRows));
  const DeviceBuffer of_rows(context(), maxima_of(whole, 1));
  const kernels::GroupsOf groups{.words = nullptr, .layout = {}, .count = kGroups, .rows = kRows};
  const DeviceBuffer all(context(), reference::to_bytes(whole, spec.in));
  const DeviceBuffer some(context(), reference::to_bytes(part, spec.in));
  for (const int64_t rows : {kSmallGroups, kLargeGroups}) {
    const auto one = GroupCastPlan::create(context_, spec, rows, kCols);
    const auto own = GroupCastPlan::create(context_, spec, rows, kPart, Maxima::kRaised);
    F8_ASSERT_OK(one);
    F8_ASSERT_OK(own);
    const Copies expected(context(), *one, whole.rows, kCols, kGroups, kGroups * kCols, kRows);
    const Copies found(context(), *own, part.rows, kPart, kGroups, kGroups * kPart, kRows);
    GroupCastCall call = call_of(groups, whole.rows, expected);
    call.x = all.as();
    F8_ASSERT_OK(one->run(call, nullptr));
    call = call_of(groups, part.rows, found);
    call.x = some.as();
    call.group_maxima = of_groups.as<uint32_t>();
    call.row_maxima = of_rows.as<uint32_t>();
    F8_ASSERT_OK(own->run(call, nullptr));
    const auto same = [](const DeviceBuffer& of_whole, int64_t at, const DeviceBuffer& of_part,
                         int64_t first, int64_t count) {
      const auto a = of_whole.download<uint8_t>(), b = of_part.download<uint8_t>();
      return std::equal(b.begin() + first, b.begin() + first + count, a.begin() + at);
    };
    for (int64_t r = 0; spec.q && r < whole.rows; r += 7) {
      const int64_t at = r * row_pitch(kCols) + kCols - kPart;
      ASSERT_TRUE(same(expected.q, at, found.q, r * row_pitch(kPart), kPart)) << "row " << r;
    }
    for (int64_t c = 0; spec.qt && c < kGroups * kPart; c += 7) {
      const int64_t line = c / kPart * kCols + kCols - kPart + c % kPart;
      ASSERT_TRUE(same(expected.qt, line * row_pitch(kRows), found.qt, c * row_pitch(kRows), kRows))
          << "column " << c;
    }
    if (spec.q && spec.scale_q == codegen::ScaleMode::kAxis) {
      const auto bytes = whole.rows * static_cast<int64_t>(sizeof(float));
      EXPECT_TRUE(same(expected.inv_row, 0, found.inv_row, 0, bytes));
    }
    EXPECT_TRUE(found.guards_are_whole());
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
