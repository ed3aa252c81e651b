// The groups of an expert linear in device memory, and the parameters of the kernels that make and
// read them; shared with the host like those of kernel_args.cuh. x has the rows of all experts, one
// group after the other; where each ends, the device alone knows.
//
// The layout of a routing (group_layout.cuh) is words of i32, whose places follow from the number of
// experts E and the largest m alone:
//   header     16 words: GroupWord
//   starts     the first row of each group                      each of these: E words, padded to 4
//   lengths    its rows
//   blocks     the sum of ceil(rows / 128) of the groups before: the columns of a transposed copy
//              begin at 128 times as many
//   scales     the sum of the rows, each padded to 4, of the groups before: where block scales begin
//   order      the groups by falling length, equal ones in their order
//   row tiles  for tiles of 64, 128, 192 and 256 rows: RowTile [m_max / rows + E]
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

inline constexpr i32 kMaxExperts = 1024;
inline constexpr i32 kGroupThreads = 1024;  // a thread for each expert
inline constexpr i32 kRowTileStep = 64;
inline constexpr i32 kRowTileTables = 4;

// The words of the header. The error is that of the first bad expert of the first bad offsets since
// the word was zero; all others are of the latest offsets.
enum GroupWord {
  kGroupError = 0,     // a GroupError
  kBadExpert = 1,      // where the error is not 0
  kGroupRows = 2,      // of all groups: the last one's end
  kGroupsInUse = 3,    // that have rows: the first ones by falling length
  kRowTileCounts = 4,  // entries in use of each table
  kGroupHeader = 16
};
enum GroupError { kNoGroupError = 0, kNegativeEnd = 1, kFallingEnd = 2, kEndBeyondM = 3 };

// Rows [row, min(row + the tile's rows, end)) of a group. An entry that is not in use has group -1.
struct RowTile {
  i32 group;
  i32 row;
  i32 end;        // of the group's rows
  i32 scale_row;  // where block scales have the tile's first row
};

struct GroupLayout {
  i32 experts;
  i32 m_max;

  F8_BOTH constexpr i64 padded_experts() const { return (experts + 3) / 4 * 4; }
  F8_BOTH constexpr i64 at_starts() const { return kGroupHeader; }
  F8_BOTH constexpr i64 at_lengths() const { return at_starts() + padded_experts(); }
  F8_BOTH constexpr i64 at_blocks() const { return at_lengths() + padded_experts(); }
  F8_BOTH constexpr i64 at_scales() const { return at_blocks() + padded_experts(); }
  F8_BOTH constexpr i64 at_order() const { return at_scales() + padded_experts(); }
  // The table of tiles of (table + 1) * kRowTileStep rows.
  F8_BOTH constexpr i64 row_tiles(i32 table) const {
    return i64{m_max / ((table + 1) * kRowTileStep)} + experts;
  }
  F8_BOTH constexpr i64 at_row_tiles(i32 table) const {
    i64 at = at_order() + padded_experts();
    for (i32 i = 0; i < table; ++i) at += row_tiles(i) * 4;
    return at;
  }
  F8_BOTH constexpr i64 words() const { return at_row_tiles(kRowTileTables); }
};

// The groups of a matrix's rows: those of a layout, or without one `count` groups of `rows` each.
struct GroupsOf {
  const i32* words;
  GroupLayout layout;
  i32 count;
  i32 rows;
};

// How the rows of a matrix with groups come to be.
enum class RowSource {
  kMatrix,          // they are those of x
  kGather,          // row i is row index[i] of x
  kGatherScore,     // times score[i]
  kSwiglu,          // silu(gate) up, where x is gate
  kSwigluBackward,  // the gradients of gate and of up, side by side: half of the columns each
  kPair             // a group has those of its matrix in x, then those of its matrix in `up`
};

// True where a block has two tiles: those of gate's and of up's gradients, which are found at once. Both
// halves of the columns are whole tiles, and the elements are in 16 bits.
F8_BOTH constexpr bool has_tile_pairs(RowSource source, bool is_f32, i64 cols) {
  return source == RowSource::kSwigluBackward && !is_f32 && cols % (2 * kCastTile) == 0;
}
// The tiles, or pairs of them, that are side by side.
F8_BOTH constexpr i32 tiles_across(RowSource source, bool is_f32, i64 cols) {
  return static_cast<i32>(has_tile_pairs(source, is_f32, cols)
                              ? cols / (2 * kCastTile)
                              : (cols + kCastTile - 1) / kCastTile);
}

// What a source reads beside x. `index` and `score` have a number for each row; rows of the others are
// `ld` elements apart. Of a pair `half_rows` are those of each matrix.
struct RowOperands {
  const i32* index;
  const float* score;
  const void* up;
  const void* grad;  // of the product
  i64 ld_up;
  i64 ld_grad;
  i32 half_rows;
  i32 padding;
};

// The amaxes of each group. `tensor` is the matrix with all groups; its words are those of all groups,
// zeroed by the caller and raised atomically: partials [groups], row_amax [rows] and col_amax
// [groups][cols].
struct GroupAmaxArgs {
  GroupsOf groups;
  AmaxTensor tensor;
  RowOperands source;
  const u32* noop_flag;  // as in AmaxOf
};
// The copies of each group. partials, row_amax and col_amax are as above. scale is [groups][kScaleStride];
// with a delayed scale, which is that of all groups, it is one, and so is the amax that is recorded.
// q is [rows], and qt [cols] with the columns of one group behind those of the other (blocks of the
// layout); without a layout [groups][cols]. The inverse scales of q and qt:
//   axis          [rows]; [groups][cols]
//   block1x128    with a layout: [ceil(cols/128)][scale_rows], a group's from its place on;
//                 [blocks of the layout][padded_scales(cols)]
//   block128x128  without one: [groups] of CastTensor's
struct GroupCastArgs {
  GroupsOf groups;
  CastTensor tensor;
  i64 scale_rows;
  RowOperands source;
  const u32* noop_flag;  // as in AmaxOf
};

// Where a group is: its rows in x, its columns in a transposed copy, its rows among block scales.
struct GroupPlace {
  i32 group;
  i32 start;
  i32 length;
  i32 qt_column;
  i32 scale_start;
};

template <class T>
F8_BOTH T* advanced(T* p, i64 count) {
  return p == nullptr ? nullptr : p + count;
}

// The matrix of a group.
F8_BOTH AmaxTensor group_of(const GroupAmaxArgs& args, const GroupPlace& at, i32 element_bytes) {
  AmaxTensor t = args.tensor;
  t.x = static_cast<const u8*>(t.x) + i64{at.start} * t.ld * element_bytes;
  t.rows = at.length;
  t.partials = advanced(t.partials, at.group);
  t.tile_amax = nullptr;
  t.row_amax = advanced(t.row_amax, at.start);
  t.col_amax = advanced(t.col_amax, i64{at.group} * t.cols);
  return t;
}

// The scales of 128x128 blocks of a matrix.
F8_BOTH constexpr i64 scales_2d(i64 rows, i64 cols) {
  return (rows + kCastTile - 1) / kCastTile * padded_scales((cols + kCastTile - 1) / kCastTile);
}
F8_BOTH CastTensor group_of(const GroupCastArgs& args, const GroupPlace& at, Scale scale_q,
                            Scale scale_qt, bool delayed, i32 element_bytes) {
  CastTensor t = args.tensor;
  t.x = static_cast<const u8*>(t.x) + i64{at.start} * t.ld * element_bytes;
  t.rows = at.length;
  t.q = advanced(t.q, i64{at.start} * t.ld_q);
  t.qt = advanced(
      t.qt, args.groups.words != nullptr ? i64{at.qt_column} : i64{at.group} * t.cols * t.ld_qt);
  t.partials = advanced(t.partials, at.group);
  t.partial_count = 1;
  t.row_amax = advanced(t.row_amax, at.start);
  t.col_amax = advanced(t.col_amax, i64{at.group} * t.cols);
  if (!delayed) t.scale = advanced(t.scale, i64{at.group} * kScaleStride);
  t.inv_scale_row = advanced(t.inv_scale_row, scale_q == Scale::kBlock1x128 ? i64{at.scale_start}
                                              : scale_q == Scale::kBlock128x128
                                                  ? at.group * scales_2d(at.length, t.cols)
                                                  : i64{at.start});
  t.inv_scale_col = advanced(t.inv_scale_col, scale_qt == Scale::kBlock1x128
                                                  ? at.qt_column / kCastTile * padded_scales(t.cols)
                                              : scale_qt == Scale::kBlock128x128
                                                  ? at.group * scales_2d(t.cols, at.length)
                                                  : i64{at.group} * t.cols);
  return t;
}

// The amaxes that the copies of groups take, in the words that `cast` has for them.
F8_BOTH GroupAmaxArgs maxima_of(const GroupCastArgs& cast) {
  GroupAmaxArgs args{};
  args.groups = cast.groups;
  args.source = cast.source;
  args.noop_flag = cast.noop_flag;
  args.tensor.x = cast.tensor.x;
  args.tensor.ld = cast.tensor.ld;
  args.tensor.rows = cast.tensor.rows;
  args.tensor.cols = cast.tensor.cols;
  args.tensor.partials = const_cast<u32*>(cast.tensor.partials);
  args.tensor.row_amax = const_cast<u32*>(cast.tensor.row_amax);
  args.tensor.col_amax = const_cast<u32*>(cast.tensor.col_amax);
  return args;
}

// Amax and cast of groups in one launch (group_quantize.cuh). The words of the amaxes, `tickets` and
// `done` are zeroed by the caller.
struct GroupQuantizeArgs {
  GroupCastArgs cast;
  u32* tickets;  // one word: the tiles, or pairs, that blocks have taken
  // The tiles whose amaxes are in the words: [groups], or [groups][across] where columns alone have scales.
  u32* done;
};
inline constexpr i32 kMostLeft = 128;  // tiles that a block can leave, to read them again

// quantize_rows.cuh over the rows of groups. Of a layout's their number is on the device.
struct GroupRowsArgs {
  CastArgs cast;         // of one matrix
  const i32* row_count;  // at most its rows; null: all of them
  RowOperands source;
};

// How a GEMM's problem is made of groups: not, by the rows of a and d, or by parts of K.
enum class Group { kNone, kM, kK };

// An M-grouped GEMM: problems[0] has the rows of all groups as m, and b has a matrix [n][k] for each
// group, which its tensor map has as the third dimension. stride_a and stride_b are as in a GEMM of
// one group.
struct GroupedGemmArgs : GemmArgs {
  const i32* groups;          // the layout's words
  const RowTile* row_tiles;   // its table for the kernel's tiles
  const i32* row_tile_count;  // entries of it in use
  void* d;                    // as d's tensor map has it
  u64 ld_d;                   // bytes, a multiple of 16
  u32 group_stride_a;  // from a group's inverse scales to the next one's; 0: of a, those of rows
  u32 group_stride_b;
  i32 zero_tail;  // 1: the rows of d behind the last group become zero
  i32 padding;
};

// A K-grouped GEMM: rows of a and b have the columns of all groups, from blocks of kCastTile on, with
// zeros behind each group's own, and d is a matrix [m][n] of each group, which its tensor map has as
// the third dimension. problems[0].k are the columns of a row. Block scales lie by these columns.
// Operands of 16 bits are [k][m] and [k][n] with the rows of all groups, and problems[0].k of them.
struct KGroupedGemmArgs : GemmArgs {
  const i32* groups;  // the layout's words
  void* d;            // as d's tensor map has it
  u64 ld_d;           // bytes, a multiple of 16
  GroupLayout layout;
  u32 group_stride_a;  // from a group's inverse scales to the next one's
  u32 group_stride_b;
};

struct GroupLayoutArgs {
  const i32* offsets;  // [experts]: where each group ends
  i32* words;          // GroupLayout::words(), 16-byte aligned
  i32 m;               // the rows of x
  i32 padding;
  GroupLayout layout;
};

}  // namespace f8::kernels
