// Kernel parameters, shared by the device templates and the host that launches them. Plain data,
// fixed layout, no toolkit header; compiled by NVRTC and by the host compiler.
//
// amax and cast kernels take several matrices in one launch: blocks [first_block, first_block +
// blocks) of the grid work on a matrix. A launch copies its kernel's whole parameters, so there are
// two sizes of kernel: for the few matrices of a layer, and for a list.
#pragma once

#ifdef __CUDACC__
#define F8_BOTH __host__ __device__ __forceinline__  // also called by the host
#else
#define F8_BOTH inline
#endif

namespace f8::kernels {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

// Which elements share a scale: codegen's ScaleMode.
enum class Scale { kTensor, kAxis, kBlock1x128, kBlock128x128 };

inline constexpr i32 kMaxTensors = 4;  // of a launch
inline constexpr i32 kMaxListed = 28;  // of a list's launch: what 4 KiB of parameters hold
// A tensor's inverse scale lies this far behind its scale: cuBLASLt takes scales at 16-byte
// boundaries.
inline constexpr i32 kInverse = 4;
inline constexpr i32 kScaleStride = 2 * kInverse;  // from one tensor's scale to the next one's
inline constexpr i32 kCastTile = 128;     // amax and cast visit a matrix in tiles of 128 x 128
inline constexpr i32 kTileThreads = 256;  // of their blocks
inline constexpr i32 kLinesOfTile = 2 * kCastTile;  // u16 maxima of its rows and columns: lines.cuh

// One matrix x[rows][cols], row stride ld elements. Every amax is kept as the bits of |x| as fp32,
// whose integer order is the order of magnitudes with NaN above all: the maximum propagates NaN.
struct AmaxTensor {
  const void* x;
  i64 ld;
  i32 rows;
  i32 cols;
  // Tensor amax alone: one word for each of `blocks`; written, never read. Beside rows or columns:
  // one word, zeroed by the caller before the launch; raised atomically.
  u32* partials;
  // Rows and columns alone, of 16-bit elements: [tiles][kLinesOfTile], 8-byte aligned; written,
  // never read. Null: the words below.
  u16* lines;
  u32* row_amax;  // [rows], zeroed by the caller before the launch; raised atomically
  u32* col_amax;  // [cols], zeroed by the caller before the launch; raised atomically
  i32 first_block;
  i32 blocks;
};

template <i32 kMost>
struct AmaxOf {
  i32 count;
  AmaxTensor tensors[kMost];
  const u32* valid;  // kernels with a flag: the launch does nothing where it holds 1; or null
};
using AmaxArgs = AmaxOf<kMaxTensors>;
using AmaxListArgs = AmaxOf<kMaxListed>;

struct CastTensor {
  const void* x;
  i64 ld;
  i32 rows;
  i32 cols;
  u8* q;  // [rows][cols] row stride ld_q bytes, or null when the kernel writes no such copy
  i64 ld_q;
  u8* qt;  // [cols][rows] row stride ld_qt bytes (multiple of 16, >= rows; the tail is zeroed)
  i64 ld_qt;
  union {
    const u32* partials;  // tensor amax as the amax kernel left it: their maximum
    const u16* lines;     // axis without a tensor amax: the amax kernel's, or null: the words
  };
  i32 partial_count;
  const u32* row_amax;   // axis: [rows]
  const u32* col_amax;   // axis: [cols]
  const float* delayed;  // delayed: the scale to cast with
  u32* amax;             // tensor, delayed: raised atomically to this matrix's amax, or null
  float* scale;          // tensor: scale[0] and its inverse scale[kInverse], by the first block
  // 1/scale of q, where it is not the tensor's: axis [rows]; block1x128
  // [ceil(cols/128)][padded_scales(rows)]; block128x128
  // [ceil(rows/128)][padded_scales(ceil(cols/128))].
  float* inv_scale_row;
  float* inv_scale_col;  // of qt, which has cols rows and rows columns, likewise
  i32 first_block;       // one block a tile, tiles row-major
  i32 blocks;
};

// Block scales are padded to whole 16 bytes a line, with zeros.
F8_BOTH constexpr i64 padded_scales(i64 count) {
  return (count + 3) / 4 * 4;
}

// What became of the elements of a copy, over all casts since the counters were zeroed.
struct CastCounters {
  u32 amax;     // bits of the largest |x| as fp32
  float scale;  // tensor: the last cast's; else not written
  u64 elements;
  u64 saturated;   // finite, and rounding would have gone beyond the format's largest
  u64 flushed;     // finite and not 0, and became 0
  u64 non_finite;  // infinite or NaN in x
};

template <i32 kMost>
struct CastOf {
  i32 count;
  // 1: the launch before is another of these kernels, which works on other memory. This one does
  // not wait for it to begin, but does not end before it.
  i32 beside;
  CastTensor tensors[kMost];
  const u32* valid;               // as an amax's
  float* sums;                    // kernels with sums: of the only matrix, or null; column_sums.cuh
  CastCounters* counters[kMost];  // kernels that count: [2], q's and qt's, or null
};
using CastArgs = CastOf<kMaxTensors>;
using CastListArgs = CastOf<kMaxListed>;
static_assert(sizeof(AmaxListArgs) <= 4096 && sizeof(CastListArgs) <= 4096);

// Amax and cast in one launch.
struct QuantizeArgs {
  CastArgs cast;
  u64* sync;  // quantize_sync_bytes(), 16-byte aligned: see quantize.cuh
};
// Of rows.cuh, where it takes q alone; then a block is for rows, not for a tile.
inline constexpr i32 kRowElements = 16384;  // that a block holds
F8_BOTH constexpr i32 threads_of_row(i64 cols) {
  i32 threads = 16;
  while (threads < kTileThreads && threads * i64{kRowElements / kTileThreads} < cols) threads *= 2;
  return threads;
}
F8_BOTH constexpr i64 blocks_of_rows(i64 rows, i64 cols) {
  const i32 at_once = kTileThreads / threads_of_row(cols);
  return (rows + at_once - 1) / at_once;
}
// Of quantize.cuh: a block has one tile or, where these are too many, two neighbours along the
// longer side of the matrix; at an odd end one.
inline constexpr i32 kMostTilesOfBlock = 2;
F8_BOTH constexpr i64 pairs_of_tiles(i64 across, i64 down) {
  return across >= down ? (across + 1) / 2 * down : across * ((down + 1) / 2);
}
inline constexpr i32 kMostLinesOfTiles = 256;  // rows and columns of tiles, of all matrices
inline constexpr i32 kStashBytes = kCastTile * kCastTile * 2;  // of a tile that waits
F8_BOTH constexpr i64 quantize_sync_bytes(i64 tiles) {
  return 16 *
         (1 + kMaxTensors + tiles * (1 + kLinesOfTile / 4) + kMostLinesOfTiles * (kCastTile / 4));
}

inline constexpr u32 kFormatE5m2 = 1;  // else e4m3
inline constexpr u32 kFormatPow2 = 2;

// The sums of the columns of each kCastTile rows of x[rows][cols], row stride ld elements.
struct ColumnSumsArgs {
  const void* x;
  i64 ld;
  i32 rows;
  i32 cols;
  float* sums;  // [ceil(rows/128)][cols]
};

// The sums of the columns of sums[count][cols]; a block for each kBiasColumns of them.
inline constexpr i32 kBiasColumns = 32;
struct BiasGradArgs {
  const float* sums;
  void* out;  // [cols]
  i32 count;
  i32 cols;
  i32 add;  // 1: to what out holds
  i32 padding;
};

// `count` operands with a delayed scale, one thread each.
struct ScaleUpdateArgs {
  u32* amax;          // [count], of this step; zeroed for the next one
  u32* history;       // [length][count] amaxes, newest first; rolled by one
  float* scale;       // [count][kScaleStride]: scale, and its inverse at kInverse
  const u32* format;  // [count]
  u32* non_finite;    // [count]: steps whose amax was not finite
  i32 count;
  i32 length;
  float margin_factor;  // 2^-margin
  i32 most_recent;      // 1: the scale comes from this step's amax, else from the largest
  i32 hold;             // 1: an amax that is not finite leaves history and scale as they are
  i32 padding;
};

// One product d[m][n] = (sum_k a[m][k] b[n][k]) * inv_scale_a * inv_scale_b (+ bias[n]); a, b and d
// come as tensor maps. Where the scales of an operand lie (x: a or b, i its row, j = k / 128):
//   tensor and axis   inv_scale_x[i * stride_x]: stride 0 is one value for all rows
//   block1x128        inv_scale_x[j * stride_x + i]
//   block128x128      inv_scale_b[i / 128 * stride_b + j]
// Block strides are multiples of 4 and the arrays 16-byte aligned.
struct GemmProblem {
  const float* inv_scale_a;
  const float* inv_scale_b;
  const void* bias;  // of d's type, or unused
  u32* amax;  // raised to the bits of max |d| as fp32; zeroed by the caller before the launch
  u32 m;
  u32 n;
  u32 k;
  u32 stride_a;
  u32 stride_b;
  u32 padding;
};

inline constexpr i32 kStageK = 128;  // of a stage: bytes, which are elements
// Rows of blocks of 128x128 of b that a tile may cover. Of each, a stage holds the scales of four
// blocks of k, one of them its own, since copies are of 16 bytes.
F8_BOTH constexpr i32 scale_rows_2d(i32 tile_n) {
  return tile_n > 128 ? 2 : 1;
}
inline constexpr i32 kScaleBytes2d = 16;
// The result leaves by 64 rows of as many columns; of 128 bytes, but where what a CTA writes of a
// tile is not of whole 64 columns of two bytes.
inline constexpr i32 kOutRows = 64;
F8_BOTH constexpr i32 out_columns(i32 columns, i32 element_bytes) {
  return element_bytes == 4 || columns % 64 != 0 ? 32 : 64;
}
// Where a CTA receives what the others that share a tile's contraction summed of its columns, and
// two barriers of each math warpgroup.
inline constexpr i32 kSplitKBarrierBytes = 16;
F8_BOTH constexpr i32 split_k_bytes(i32 tile_m, i32 tile_n, i32 split_k, i32 warpgroups) {
  if (split_k == 1) return 0;
  return (split_k - 1) * tile_m * (tile_n / split_k) * 4 + kSplitKBarrierBytes * warpgroups;
}
inline constexpr i32 kMaxProblems = 2;
// Clusters of two that run at once: no Hopper has more than 144 SMs.
inline constexpr i32 kMaxRemappedClusters = 72;

struct GemmArgs {
  GemmProblem problems[kMaxProblems];
  u32 raster_group;  // rows of tiles that rasterisation keeps together
  // The tail-balancing offset of a grouped GEMM: how many tiles of the second problem a cluster
  // computes first that has one tile of the first problem less than others.
  u32 tail_offset;
  // Clusters of two: the index that a cluster takes in the tile schedule, by its index in the grid; a
  // permutation.
  u8 cluster_remap[kMaxRemappedClusters];
};

}  // namespace f8::kernels
