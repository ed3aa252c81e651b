// Kernel parameters, shared by the device templates and the host that launches them. They are plain
// data of a fixed layout without toolkit headers, compiled by NVRTC and by the host compiler; each
// stub asserts the host's sizes.
//
// amax and cast kernels take several matrices in one launch: blocks [first_block, first_block +
// blocks) of the grid work on a matrix. A launch copies all parameters of its kernel, so kernels
// come in two sizes: for the few matrices of a layer, and for a list.
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

// The elements that share a scale: codegen's ScaleMode.
enum class Scale { kTensor, kAxis, kBlock1x128, kBlock128x128 };

inline constexpr i32 kMaxTensors = 4;  // of a launch
inline constexpr i32 kMaxListed = 28;  // of a list's launch: what 4 KiB of parameters hold
// A tensor's inverse scale lies this far behind its scale: cuBLASLt takes scales at 16-byte
// boundaries.
inline constexpr i32 kInverse = 4;
inline constexpr i32 kScaleStride = 2 * kInverse;  // from one tensor's scale to the next one's
inline constexpr i32 kCastTile = 128;              // amax and cast kernels read tiles of 128 x 128
inline constexpr i32 kTileThreads = 256;           // in blocks of as many threads
// The amax partials of a tile: the u16 amaxes of its rows and columns (tile_amax.cuh).
inline constexpr i32 kTileAmaxSize = 2 * kCastTile;

// Where a shard's rows are in the whole tensor, whose blocks of 128x128 it may cut. What is kept of
// blocks then is the whole's: amaxes [ceil(whole_rows/128)][ceil(cols/128)], and inverse scales.
struct ShardRows {
  i32 first;  // row of the whole
  i32 whole;
};

// One matrix x[rows][cols], row stride ld elements. Every amax is kept as the bits of |x| as fp32,
// whose integer order is the order of magnitudes with NaN above all: the maximum propagates NaN.
struct AmaxTensor {
  const void* x;
  i64 ld;
  i32 rows;
  i32 cols;
  // A tensor amax alone leaves one word for each of `blocks`, written and never read. Together with
  // rows or columns it is one word, which the caller zeroes and the launch raises atomically.
  u32* partials;
  // Per-tile amax partials, for rows and columns of 16-bit elements without a tensor amax:
  // [tiles][kTileAmaxSize], 8-byte aligned, written and never read. Null: the words below.
  u16* tile_amax;
  union {
    u32* row_amax;    // [rows], zeroed by the caller before the launch; raised atomically
    ShardRows shard;  // block
  };
  union {
    u32* col_amax;    // [cols], zeroed by the caller before the launch; raised atomically
    u32* block_amax;  // block: of the whole, likewise
  };
  i32 first_block;
  i32 blocks;
};

template <i32 kMost>
struct AmaxOf {
  i32 count;
  AmaxTensor tensors[kMost];
  const u32* noop_flag;  // kernels with a flag: the launch does nothing where it holds 1; or null
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
    const u32* partials;   // tensor: the amax kernel's, whose maximum is the amax
    const u16* tile_amax;  // axis without a tensor amax: the amax kernel's; null: the words below
  };
  i32 partial_count;
  union {
    const u32* row_amax;  // axis: [rows]
    ShardRows shard;      // shard
  };
  union {
    const u32* col_amax;    // axis: [cols]
    const u32* block_amax;  // shard: of the whole
  };
  const float* delayed;  // delayed: the scale to cast with
  u32* amax;             // tensor, delayed: raised atomically to this matrix's amax, or null
  float* scale;          // tensor: scale[0] and its inverse scale[kInverse], by the first block
  // The inverse scales of q, where it has not the tensor's:
  //   axis          [rows]
  //   block1x128    [ceil(cols/128)][padded_scales(rows)]
  //   block128x128  [ceil(rows/128)][padded_scales(ceil(cols/128))]; shard: rows of the whole
  float* inv_scale_row;
  float* inv_scale_col;  // likewise of qt, which has cols rows and rows columns
  i32 first_block;       // one block a tile, tiles row-major
  i32 blocks;
};

// Each row of block scales is padded to whole 16 bytes, with zeros.
F8_BOTH constexpr i64 padded_scales(i64 count) {
  return (count + 3) / 4 * 4;
}

// Counts of what became of the elements of a copy, over all casts since the counters were zeroed.
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
  // 1: the previous launch is another of these kernels and works on other memory. This one overlaps
  // it (PDL), but does not end before it.
  i32 overlap;
  CastTensor tensors[kMost];
  const u32* noop_flag;           // as in AmaxOf
  float* sums;                    // kernels with sums: of the only matrix, or null; column_sums.cuh
  CastCounters* counters[kMost];  // kernels that count: [2], q's and qt's, or null
};
using CastArgs = CastOf<kMaxTensors>;
using CastListArgs = CastOf<kMaxListed>;
static_assert(sizeof(AmaxListArgs) <= 4096 && sizeof(CastListArgs) <= 4096);

// The activations of activations.cuh: float8_activation of the C interface.
enum class Activation : u8 { kSilu, kGelu, kGeluTanh, kRelu2 };

// The cast, or the maxima, of what is computed of the tensors' x as it is read (activation_cast.cuh,
// activation_amax.cuh, norm.cuh). Of a GLU x is gate; its gradients are two tensors of one shape, whose x are gate and up.
template <class Of>
struct ComputedOf {
  Of of;
  // It has x's type, and is up of a GLU or the gradient of what forward made, of x's shape; or the weight of a
  // norm, [cols], which has no ld_factor. It is null for an activation alone.
  const void* factor;
  i64 ld_factor;
  const float* rstd;  // [rows], of a norm
  const float* mean;  // [rows], of a LayerNorm
  const void* bias;   // [cols] in x's type, of a LayerNorm, or null
  // Maxima of activations alone: where what is computed of each tensor goes, [rows][cols] in x's type.
  void* results[2];
};
using ComputedCastArgs = ComputedOf<CastArgs>;
using ComputedAmaxArgs = ComputedOf<AmaxArgs>;

// Amax and cast in one launch.
struct QuantizeArgs {
  CastArgs cast;
  u64* sync;  // quantize_sync_bytes(), 16-byte aligned: see quantize.cuh
};
// quantize_rows.cuh makes q alone; its blocks have whole rows, not a tile.
inline constexpr i32 kRowElements = 16384;  // of a block, in registers
F8_BOTH constexpr i32 threads_of_row(i64 cols) {
  i32 threads = 16;
  while (threads < kTileThreads && threads * i64{kRowElements / kTileThreads} < cols) threads *= 2;
  return threads;
}
F8_BOTH constexpr i64 blocks_of_rows(i64 rows, i64 cols) {
  const i32 at_once = kTileThreads / threads_of_row(cols);
  return (rows + at_once - 1) / at_once;
}
// In quantize.cuh a block has one tile or, where these are too many, two neighbours along the
// longer side of the matrix (one at an odd end).
inline constexpr i32 kMaxTilesOfBlock = 2;
F8_BOTH constexpr i64 pairs_of_tiles(i64 across, i64 down) {
  return across >= down ? (across + 1) / 2 * down : across * ((down + 1) / 2);
}
inline constexpr i32 kMaxStrips = 256;  // rows and columns of tiles, of all matrices
inline constexpr i32 kStashBytes = kCastTile * kCastTile * 2;  // of a tile kept in shared memory
F8_BOTH constexpr i64 quantize_sync_bytes(i64 tiles) {
  return 16 * (1 + kMaxTensors + tiles * (1 + kTileAmaxSize / 4) + kMaxStrips * (kCastTile / 4));
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

// `count` operands with a delayed scale, in one block.
struct ScaleUpdateArgs {
  u32* amax;          // [count], of this step; zeroed for the next one
  u32* history;       // [length][count] amaxes, newest first; rolled by one; first: not used
  float* scale;       // [count][kScaleStride]: scale, and its inverse at kInverse
  const u32* format;  // [count]
  u32* non_finite;    // [count]: steps whose amax was not finite
  i32 count;
  i32 length;
  float margin_factor;  // 2^-margin
  i32 most_recent;      // 1: the scale comes from the newest amax, else from the largest
  i32 freeze;           // 1: an amax that is not finite freezes its operand, else it drops the step
  i32 drop;             // 1: the step's amaxes are dropped, history and scale stay as they are
  const float* found_inf;  // the step is dropped too where this is not 0; or null
  i32 first;               // 1: the scales come from the amaxes alone, as in dynamic scaling
  i32 padding;
};

// The launch finds whether one of `count` amaxes is not finite; each thread reads one.
struct FoundInfArgs {
  const u32* amax;
  float* found_inf;  // becomes 1 then, else stays as it is
  i32 count;
  i32 padding;
};

// One GEMM d[m][n] = (sum_k a[m][k] b[n][k]) * inv_scale_a * inv_scale_b (+ bias[n]); a, b and d
// come as tensor maps. The scales of an operand lie at (x: a or b, i its row, j = k / 128):
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
  u32 shard_blocks;  // of kStageK in a shard of b; all of K where b is one
};

inline constexpr i32 kStageK = 128;  // of a stage: bytes, which are elements
inline constexpr i32 kMaxProblems = 2;
// Clusters of two that run at once: no Hopper has more than 144 SMs.
inline constexpr i32 kMaxRemappedClusters = 72;

struct GemmArgs {
  GemmProblem problems[kMaxProblems];
  u32 raster_group;  // rows of tiles that rasterisation keeps together
  // The tail-balancing offset of a grouped GEMM: how many tiles of the second problem a cluster
  // computes first that has one tile of the first problem less than others.
  u32 tail_offset;
  // Clusters of two: the index that a cluster takes in the tile schedule, by its index in the grid;
  // a permutation.
  u8 cluster_remap[kMaxRemappedClusters];
};

}  // namespace f8::kernels
