// Per-tile amax partials: the amaxes of each tile's rows and columns, passed between kernels or
// blocks through global memory without atomics. For each tile of a matrix, row-major, they are the
// u16 magnitudes of its 128 rows and then of its 128 columns, 512 bytes. A tile writes its own; the
// amax of a row or column over the whole matrix is the maximum over the tiles of its row or column
// of tiles. They exist for 16-bit inputs alone.
#pragma once

#include "codegen/kernels/cast/matrix_tile.cuh"

namespace f8::kernels {

F8_DEVICE u64 load_relaxed(const u64* p) {
  u64 r;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(r) : "l"(p) : "memory");
  return r;
}

template <bool kRow, bool kColumn, Input kInput>
F8_DEVICE void store_tile_amax(u16* of_tile, const TileAmax<kInput>& tile_amax) {
  constexpr u32 kQuads = kCastTile / 4;
  const u32 index = threadIdx.x;
  u64* const to = reinterpret_cast<u64*>(of_tile) + index;
  if (kRow && index < kQuads) *to = tile_amax.quad_of_rows(index);
  if (kColumn && index >= kQuads && index < 2 * kQuads)
    *to = tile_amax.quad_of_columns(index - kQuads);
}

// The coordinates of a tile in a matrix of across x down tiles, and the indices of the tiles in its
// row and in its column.
struct TileCoord {
  i32 across, down, row, column;
  F8_DEVICE TileCoord(i32 rows, i32 cols, i32 index)
      : across((cols + kCastTile - 1) / kCastTile),
        down((rows + kCastTile - 1) / kCastTile),
        row(index / across),
        column(index % across) {}
  F8_DEVICE i32 in_row(i32 i) const { return row * across + i; }
  F8_DEVICE i32 in_column(i32 i) const { return i * across + column; }
};

// The amax over the whole matrix of each of a tile's rows and columns.
struct RowColumnAmax {
  u32 pairs[kTileThreads / 32][kCastTile / 2];  // of each warp, two rows or columns a word

  // Four warps read the tiles of `tile`'s row, four those of its column, each lane 4 rows or
  // columns of a tile. `tile_amax` is of the whole matrix.
  template <bool kRow, bool kColumn>
  F8_DEVICE void gather(const u16* tile_amax, const TileCoord& tile) {
    const i32 warp = static_cast<i32>(threadIdx.x / 32);
    const u32 lane = threadIdx.x % 32;
    const bool by_row = warp < 4;
    const i32 count = by_row ? (kRow ? tile.across : 0) : (kColumn ? tile.down : 0);
    const i32 first = by_row ? tile.in_row(0) : tile.in_column(0);
    const i32 step = by_row ? 1 : tile.across;
    const u64* from = reinterpret_cast<const u64*>(tile_amax + (by_row ? 0 : kCastTile)) + lane;
    u32 low = 0;
    u32 high = 0;
#pragma unroll 8
    for (i32 i = warp % 4; i < count; i += 4) {
      const u64 quad = load_relaxed(from + (first + i * step) * (kTileAmaxSize / 4));
      low = max_u16x2(low, static_cast<u32>(quad));
      high = max_u16x2(high, static_cast<u32>(quad >> 32));
    }
    pairs[warp][2 * lane] = low;
    pairs[warp][2 * lane + 1] = high;
    __syncthreads();
  }
  F8_DEVICE u32 row(u32 i) const {
    return magnitude(0, i);
  }
  F8_DEVICE u32 column(u32 i) const {
    return magnitude(4, i);
  }

 private:
  F8_DEVICE u32 magnitude(u32 first_warp, u32 i) const {
    u32 most = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) most = max_u16x2(most, pairs[first_warp + w][i / 2]);
    return i % 2 == 0 ? most & 0xFFFFU : most >> 16;
  }
};

}  // namespace f8::kernels
