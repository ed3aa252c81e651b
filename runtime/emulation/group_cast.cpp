// The amax and cast kernels over groups of rows: group by group, as those of a matrix alone.
#include <algorithm>
#include <bit>
#include <vector>

#include "codegen/kernels/experts/group_args.cuh"
#include "recipes/reference/reference.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/activations.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

// Calls work(place) for each group that has rows.
template <class Work>
void each_group(const kernels::GroupsOf& groups, const Work& work) {
  if (groups.words == nullptr) {
    for (int e = 0; e < groups.count; ++e) {
      work(kernels::GroupPlace{e, e * groups.rows, groups.rows, 0, 0});
    }
    return;
  }
  const kernels::GroupLayout& layout = groups.layout;
  const int* const words = groups.words;
  for (int e = 0; e < layout.experts; ++e) {
    const int length = words[layout.at_lengths() + e];
    if (length == 0) continue;
    work(kernels::GroupPlace{e, words[layout.at_starts() + e], length,
                             words[layout.at_blocks() + e] * kernels::kCastTile,
                             words[layout.at_scales() + e]});
  }
}

template <class Spec>
unsigned across(const Spec& spec, int cols) {
  return static_cast<unsigned>(kernels::tiles_across(spec.source, spec.in == Dtype::kF32, cols));
}

// Finds what is wrong with a launch: it has a block for each tile, or pair of them, that there is.
void check_grid(const kernels::GroupsOf& groups, unsigned across, const Call& call) {
  unsigned tiles = 0;
  each_group(groups, [&](const kernels::GroupPlace& at) {
    tiles += cast_tiles(at.length, kernels::kCastTile) * across;
  });
  const unsigned grid = call.launch.grid;
  if (grid < tiles || (groups.words == nullptr && grid != tiles)) {
    call.fault("grid {} for {} tiles of groups", grid, tiles);
  }
}

int element_bytes(Dtype type) {
  return static_cast<int>(size_bytes(type));
}

// Finds what is wrong with the operands of a source.
void check_operands(kernels::RowSource source, const void* x, const kernels::RowOperands& from,
                    const Call& call) {
  using kernels::RowSource;
  const bool gathers = source == RowSource::kGather || source == RowSource::kGatherScore;
  const bool pair = source == RowSource::kPair;
  const bool two = pair || source == RowSource::kSwiglu || source == RowSource::kSwigluBackward;
  if (pair && from.half_rows <= 0) call.fault("groups: a pair of {} rows", from.half_rows);
  if (gathers && from.index == nullptr) call.fault("groups: no index");
  if (source == RowSource::kGatherScore && from.score == nullptr) call.fault("groups: no scores");
  if (two && (from.up == nullptr || !is_aligned(from.up))) {
    call.fault("groups: up misaligned or null");
  }
  if (source == RowSource::kSwigluBackward && (from.grad == nullptr || !is_aligned(from.grad))) {
    call.fault("groups: grad misaligned or null");
  }
  if (x == nullptr || !is_aligned(x)) call.fault("groups: x misaligned or null");
}

// An element of the matrix that a cast of groups has: row `row` of all groups.
float element_of(kernels::RowSource source, const void* x, int64_t ld, int64_t cols,
                 const kernels::RowOperands& from, int64_t row, int64_t column, Dtype type) {
  using kernels::RowSource;
  const auto at = [&](const void* base, int64_t ld_of, int64_t r, int64_t c) {
    return load_element(base, r * ld_of + c, type);
  };
  switch (source) {
    case RowSource::kMatrix:
      return at(x, ld, row, column);
    case RowSource::kGather:
      return at(x, ld, from.index[row], column);
    case RowSource::kGatherScore:
      return at(x, ld, from.index[row], column) * from.score[row];
    case RowSource::kSwiglu:
      return glu(Activation::kSilu, at(x, ld, row, column), at(from.up, from.ld_up, row, column),
                 type);
    case RowSource::kPair: {
      const int64_t in_group = row % (2 * from.half_rows);
      const int64_t first = (row - in_group) / 2;
      return in_group < from.half_rows
                 ? at(x, ld, first + in_group, column)
                 : at(from.up, from.ld_up, first + in_group - from.half_rows, column);
    }
    case RowSource::kSwigluBackward:
      break;
  }
  const bool of_up = column >= cols / 2;
  const int64_t c = of_up ? column - cols / 2 : column;
  const auto both =
      glu_backward(Activation::kSilu, at(x, ld, row, c), at(from.up, from.ld_up, row, c),
                   at(from.grad, from.ld_grad, row, c), type);
  return of_up ? both.up : both.gate;
}

// The rows [start, start + count) of what a source gives, dense. operator new aligns it to 16 bytes, as
// the kernels need.
std::vector<uint8_t> rows_of(kernels::RowSource source, const void* x, int64_t ld, int64_t cols,
                             const kernels::RowOperands& from, int64_t start, int64_t count,
                             Dtype type) {
  static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16);
  std::vector<uint8_t> made(static_cast<size_t>(count * cols) * size_bytes(type));
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      store_element(made.data(), r * cols + c,
                    element_of(source, x, ld, cols, from, start + r, c, type), type);
    }
  }
  return made;
}

// Lets a group's matrix, or that of all groups, have the rows of its source, which `made` keeps.
template <class Tensor, class Spec>
std::vector<uint8_t> take_rows(const Spec& spec, const Tensor& whole,
                               const kernels::RowOperands& from, int64_t start, Tensor& t) {
  if (spec.source == kernels::RowSource::kMatrix) return {};
  std::vector<uint8_t> made = rows_of(spec.source, whole.x, whole.ld, whole.cols, from, start,
                                      t.rows, codegen::memory_type(spec));
  t.x = made.data();
  t.ld = whole.cols;
  return made;
}

}  // namespace

void emulate_groups(const codegen::AmaxSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::GroupAmaxArgs>();
  check_grid(args.groups, across(spec, args.tensor.cols), call);
  if (spec.tensor && args.tensor.partials == nullptr) call.fault("groups: no words of tensors");
  if (!call.faults.empty()) return;
  check_operands(spec.source, args.tensor.x, args.source, call);
  if (!call.faults.empty() || is_noop(spec.noop_flag, args.noop_flag)) return;
  codegen::AmaxSpec alone = spec;
  alone.group = alone.noop_flag = false;
  alone.source = kernels::RowSource::kMatrix;
  const bool axes = spec.row || spec.col;
  each_group(args.groups, [&](const kernels::GroupPlace& at) {
    kernels::AmaxArgs one{};
    one.count = 1;
    kernels::AmaxTensor& t = one.tensors[0] =
        kernels::group_of(args, at, element_bytes(codegen::memory_type(spec)));
    const auto rows = take_rows(spec, args.tensor, args.source, at.start, t);
    t.first_block = 0;
    t.blocks = axes ? static_cast<int>(cast_tiles(at.length, t.cols)) : 1;
    uint32_t* const raised = t.partials;
    uint32_t amax = 0;
    if (!axes) t.partials = &amax;  // which that kernel writes
    Launch launch = call.launch;
    launch.grid = static_cast<unsigned>(t.blocks);
    void* const parameters[] = {&one};
    emulate(alone, Call{call.module, launch, parameters, call.sm_count, call.faults});
    if (!axes) *raised = std::max(*raised, amax);
  });
}

namespace {

void cast_alone(const codegen::CastSpec& spec, const kernels::CastTensor& tensor,
                const Call& call) {
  codegen::CastSpec alone = spec;
  alone.group = alone.one_launch = false;
  alone.source = kernels::RowSource::kMatrix;
  std::vector<kernels::CastArgs> one(1);
  one[0].count = 1;
  kernels::CastTensor& t = one[0].tensors[0] = tensor;
  t.first_block = 0;
  t.blocks = static_cast<int>(cast_tiles(tensor.rows, tensor.cols));
  Launch launch = call.launch;
  launch.grid = static_cast<unsigned>(t.blocks);
  void* const parameters[] = {one.data()};
  emulate(alone, Call{call.module, launch, parameters, call.sm_count, call.faults});
}

void quantize_rows(const codegen::CastSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::GroupRowsArgs>();
  kernels::CastTensor t = args.cast.tensors[0];
  if (args.cast.count != 1) return call.fault("rows of groups: {} matrices", args.cast.count);
  if (call.launch.grid != kernels::blocks_of_rows(t.rows, t.cols)) {
    return call.fault("rows of groups: grid {} for {} rows", call.launch.grid, t.rows);
  }
  if (args.row_count != nullptr) t.rows = std::min(t.rows, *args.row_count);
  if (t.rows == 0) return;
  check_operands(spec.source, t.x, args.source, call);
  if (!call.faults.empty()) return;
  const kernels::CastTensor whole = t;
  const auto rows = take_rows(spec, whole, args.source, 0, t);
  std::vector<uint32_t> amax(static_cast<size_t>(t.rows));
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols; ++c) {
      const uint32_t bits = std::bit_cast<uint32_t>(load_element(t.x, r * t.ld + c, spec.in));
      amax[static_cast<size_t>(r)] = std::max(amax[static_cast<size_t>(r)], bits & 0x7fffffffU);
    }
  }
  t.tile_amax = nullptr;
  t.row_amax = amax.data();
  cast_alone(spec, t, call);
}

void cast_groups(const codegen::CastSpec& spec, const kernels::GroupCastArgs& args,
                 const Call& call) {
  const bool rows_1d = spec.q && spec.scale_q == codegen::ScaleMode::kBlock1x128;
  const bool columns_1d = spec.qt && spec.scale_qt == codegen::ScaleMode::kBlock1x128;
  const bool blocks_2d = codegen::has_scale(spec, codegen::ScaleMode::kBlock128x128);
  if (args.groups.words == nullptr ? rows_1d || columns_1d : blocks_2d) {
    call.fault("groups of a layout have scales of 1x128 blocks, equal ones of 128x128");
  }
  check_operands(spec.source, args.tensor.x, args.source, call);
  if (!call.faults.empty() || is_noop(spec.noop_flag, args.noop_flag)) return;
  each_group(args.groups, [&](const kernels::GroupPlace& at) {
    kernels::CastTensor t =
        kernels::group_of(args, at, static_cast<kernels::Scale>(spec.scale_q),
                          static_cast<kernels::Scale>(spec.scale_qt), spec.delayed,
                          element_bytes(codegen::memory_type(spec)));
    const auto rows = take_rows(spec, args.tensor, args.source, at.start, t);
    // The kernel of a matrix alone has its scales of 1x128 closer together, and nothing in qt's rows
    // behind the group's columns and their padding.
    const int64_t blocks = ceil_div(t.cols, kernels::kCastTile);
    const int64_t own = kernels::padded_scales(at.length);
    std::vector<float> scales(rows_1d ? static_cast<size_t>(blocks * own) : 0);
    float* const scales_to = t.inv_scale_row;
    if (rows_1d) t.inv_scale_row = scales.data();
    const bool moves_qt = spec.qt && args.groups.words != nullptr;
    uint8_t* const qt_to = t.qt;
    if (moves_qt) t.ld_qt = row_pitch(at.length);
    std::vector<uint8_t> qt(moves_qt ? static_cast<size_t>(t.cols * t.ld_qt) : 0);
    if (moves_qt) t.qt = qt.data();
    cast_alone(spec, t, call);
    for (int64_t block = 0; rows_1d && block < blocks; ++block) {
      std::copy_n(scales.data() + block * own, own, scales_to + block * args.scale_rows);
    }
    for (int64_t c = 0; moves_qt && c < t.cols; ++c) {
      std::copy_n(t.qt + c * t.ld_qt, t.ld_qt, qt_to + c * args.tensor.ld_qt);
    }
  });
}

// Amaxes and casts in one launch, whose blocks take both from a counter.
void quantize_groups(const codegen::CastSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::GroupQuantizeArgs>();
  const kernels::GroupCastArgs& cast = args.cast;
  if (args.tickets == nullptr || args.done == nullptr || *args.tickets != 0) {
    return call.fault("groups in one launch: no words for its items, or not zeroed");
  }
  const unsigned of_row = across(spec, cast.tensor.cols);
  const bool column_units = codegen::scales_columns_alone(spec);
  unsigned tiles = 0;
  each_group(cast.groups, [&](const kernels::GroupPlace& at) {
    const unsigned down = cast_tiles(at.length, kernels::kCastTile);
    const unsigned units = column_units ? of_row : 1;
    for (unsigned i = 0; i < units; ++i) {
      uint32_t& done = args.done[static_cast<unsigned>(at.group) * units + i];
      if (done != 0) call.fault("group {}: its tiles are counted already", at.group);
      done = down * of_row / units;
    }
    tiles += down * of_row;
  });
  if (!call.faults.empty()) return;
  *args.tickets = tiles + call.launch.grid;  // each block ends at a ticket of no tile
  kernels::GroupAmaxArgs amax = kernels::maxima_of(cast);
  Launch launch = call.launch;
  launch.grid = tiles;
  void* const parameters[] = {&amax};
  codegen::CastSpec two_launches = spec;
  two_launches.one_launch = false;
  emulate_groups(*codegen::amax_before(two_launches),
                 Call{call.module, launch, parameters, call.sm_count, call.faults});
  cast_groups(two_launches, cast, call);
}

}  // namespace

void emulate_groups(const codegen::CastSpec& spec, const Call& call) {
  if (codegen::scales_rows_alone(spec) && spec.one_launch) return quantize_rows(spec, call);
  if (spec.one_launch) return quantize_groups(spec, call);
  const auto& args = call.args<kernels::GroupCastArgs>();
  check_grid(args.groups, across(spec, args.tensor.cols), call);
  cast_groups(spec, args, call);
}

}  // namespace f8::runtime::emulation
