// Kernel parameters, shared by the device templates and the host that launches them. Plain data,
// fixed layout, no toolkit header; compiled by NVRTC and by the host compiler.
//
// amax and cast kernels take a list of up to kMaxTensors matrices in one launch: blocks
// [first_block, first_block + blocks) of the grid work on a matrix.
#pragma once

namespace f8::kernels {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

inline constexpr i32 kMaxTensors = 4;
// A tensor's inverse scale lies this far behind its scale: cuBLASLt takes scales at 16-byte
// boundaries.
inline constexpr i32 kInverse = 4;
inline constexpr i32 kCastTile = 128;  // amax and cast visit a matrix in tiles of 128 x 128

// One matrix x[rows][cols], row stride ld elements. Every amax is kept as the bits of |x| as fp32,
// whose integer order is the order of magnitudes with NaN above all: the maximum propagates NaN.
struct AmaxTensor {
  const void* x;
  i64 ld;
  i32 rows;
  i32 cols;
  u32* partials;  // tensor amax: one word for each of `blocks`; written, never read
  u32* row_amax;  // [rows], zeroed by the caller before the launch; raised atomically
  u32* col_amax;  // [cols], zeroed by the caller before the launch; raised atomically
  i32 first_block;
  i32 blocks;
};

struct AmaxArgs {
  i32 count;
  AmaxTensor tensors[kMaxTensors];
};

struct CastTensor {
  const void* x;
  i64 ld;
  i32 rows;
  i32 cols;
  u8* q;  // [rows][cols] row stride ld_q bytes, or null when the kernel writes no such copy
  i64 ld_q;
  u8* qt;  // [cols][rows] row stride ld_qt bytes (multiple of 16, >= rows; the tail is zeroed)
  i64 ld_qt;
  const u32* partials;  // tensor amax as the amax kernel left it: their maximum
  i32 partial_count;
  const u32* row_amax;   // [rows]
  const u32* col_amax;   // [cols]
  float* scale;          // tensor: scale[0] and its inverse scale[kInverse], by the first block
  float* inv_scale_row;  // [rows], 1/scale of q's rows
  float* inv_scale_col;  // [cols], 1/scale of qt's rows
  i32 first_block;       // one block a tile, tiles row-major
  i32 blocks;
};

struct CastArgs {
  i32 count;
  CastTensor tensors[kMaxTensors];
};

// d[m][n] = (sum_k a[m][k] b[n][k]) * inv_scale_a * inv_scale_b (+ bias[n]); a, b and d come as
// tensor maps.
struct GemmArgs {
  const float* inv_scale_a;  // 1 value, or [m] with the rowwise epilogue
  const float* inv_scale_b;  // 1 value, or [n]
  u32 m;
  u32 n;
  u32 k;
  u32 group;  // rows of tiles that rasterisation keeps together
};

}  // namespace f8::kernels
