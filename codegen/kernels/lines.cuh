// The maxima of each tile's lines, passed between blocks through global memory without atomics: for
// each tile of a matrix, row-major, the u16 magnitudes of its 128 rows and of its 128 columns,
// 512 bytes. A tile writes its own; its lines' maxima over the whole matrix are in those of the
// tiles beside it and of those above and below it. 16-bit inputs alone.
#pragma once

#include "matrix_tile.cuh"

namespace f8::kernels {

F8_DEVICE u64 load_relaxed(const u64* p) {
  u64 r;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(r) : "l"(p) : "memory");
  return r;
}

template <bool kRow, bool kColumn, Input kInput>
F8_DEVICE void store_lines(u16* of_tile, const TileMaxima<kInput>& maxima) {
  constexpr u32 kUnits = kCastTile / 4;
  const u32 unit = threadIdx.x;
  u64* const to = reinterpret_cast<u64*>(of_tile) + unit;
  if (kRow && unit < kUnits) *to = maxima.four_rows(unit);
  if (kColumn && unit >= kUnits && unit < 2 * kUnits) *to = maxima.four_columns(unit - kUnits);
}

// A matrix in tiles, and the place of one of them.
struct TilePlace {
  i32 across, down, row, column;
  F8_DEVICE TilePlace(i32 rows, i32 cols, i32 index)
      : across((cols + kCastTile - 1) / kCastTile),
        down((rows + kCastTile - 1) / kCastTile),
        row(index / across),
        column(index % across) {}
  F8_DEVICE i32 beside(i32 i) const { return row * across + i; }
  F8_DEVICE i32 above(i32 i) const { return i * across + column; }
};

// The amax of each of a tile's rows and columns over the whole matrix.
struct LineMaxima {
  u32 pairs[kTileThreads / 32][kCastTile / 2];  // of each warp, two lines a word

  // Four warps go over the tiles beside `tile`, four over those above and below, each lane 4 lines
  // of a tile. `lines` are the matrix's.
  template <bool kRow, bool kColumn>
  F8_DEVICE void gather(const u16* lines, const TilePlace& tile) {
    const i32 warp = static_cast<i32>(threadIdx.x / 32);
    const u32 lane = threadIdx.x % 32;
    const bool by_row = warp < 4;
    const i32 count = by_row ? (kRow ? tile.across : 0) : (kColumn ? tile.down : 0);
    const i32 first = by_row ? tile.beside(0) : tile.above(0);
    const i32 step = by_row ? 1 : tile.across;
    const u64* from = reinterpret_cast<const u64*>(lines + (by_row ? 0 : kCastTile)) + lane;
    u32 low = 0;
    u32 high = 0;
#pragma unroll 8
    for (i32 i = warp % 4; i < count; i += 4) {
      const u64 four = load_relaxed(from + (first + i * step) * (kLinesOfTile / 4));
      low = max_u16x2(low, static_cast<u32>(four));
      high = max_u16x2(high, static_cast<u32>(four >> 32));
    }
    pairs[warp][2 * lane] = low;
    pairs[warp][2 * lane + 1] = high;
    __syncthreads();
  }
  F8_DEVICE u32 row(u32 line) const {
    return magnitude(0, line);
  }
  F8_DEVICE u32 column(u32 line) const {
    return magnitude(4, line);
  }

 private:
  F8_DEVICE u32 magnitude(u32 first_warp, u32 line) const {
    u32 most = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) most = max_u16x2(most, pairs[first_warp + w][line / 2]);
    return line % 2 == 0 ? most & 0xFFFFU : most >> 16;
  }
};

}  // namespace f8::kernels
