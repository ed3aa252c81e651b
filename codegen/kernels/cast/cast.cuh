// The fused cast: q = fp8(x * scale), written row-major, transposed, or both while x is read once.
// Each copy has its own mode of scales:
//   tensor        from the amax kernel's words; or delayed: a scale that is on the device already,
//                 while the tensor's amax is recorded on the way. Such a scale does not show an
//                 infinity, so without kSaturate the cast itself makes it NaN
//   axis          one for each row of the copy, from the amax kernel's words or per-tile partials
//   block1x128    (1D) one for each row of the copy in this tile, from the tile's own amaxes
//   block128x128  (2D) one for the tile, from its own amax; a shard's from the words of the whole
//
// A shard is some rows of a whole tensor, whose blocks it may cut: a tile's 128 rows may lie in two
// of them, so each row has a scale. The first row of tiles writes the inverse scales of the whole.
//
// One block casts one 128 x 128 tile, each thread 8 x 8 elements. The row-major copy goes straight
// to memory, 8 bytes a thread and 128 neighbouring ones a half-warp. The transposed one passes
// through shared memory: row c holds the tile's column c as 16 chunks of 8 bytes (8 rows each),
// chunk u at position u ^ (c / 8), which makes both the 8-byte writes and the 16-byte reads free of
// bank conflicts.
//
// Tiles are cast in reverse order: what the amax kernel read last is still in the L2 cache.
#pragma once

#include "codegen/kernels/cast/cast_counters.cuh"
#include "codegen/kernels/cast/column_sums.cuh"
#include "codegen/kernels/cast/scale.cuh"
#include "codegen/kernels/cast/tile_amax.cuh"

namespace f8::kernels {

template <Fp8 kFormat>
F8_DEVICE u32 pack_fp8(float low, float high) {
  u16 packed;
  if constexpr (kFormat == Fp8::kE4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Config is the stub's: kInput, kFormat, kScaleQ, kScaleQt, kDelayed, kRowMajor, kTransposed,
// kPow2, kSaturate, kCount, kSums, kNoopFlag, kShard.
// kStores is how long L2 keeps the copies.
template <class Config, Evict kStores = Evict::kByAge>
struct Cast {
  struct Scales {
    float row[kCastTile];  // of q's rows in the tile; of a shard, those of its blocks
    float column[kCastTile];
    float tensor;
    float tile;
  };

  template <Scale kMode>
  static constexpr bool kUses = (Config::kRowMajor && Config::kScaleQ == kMode) ||
                                (Config::kTransposed && Config::kScaleQt == kMode);
  static constexpr bool kTensorScale = kUses<Scale::kTensor>;
  static constexpr bool kDelayed = kTensorScale && Config::kDelayed;
  static constexpr bool kRowBlocks = Config::kRowMajor && Config::kScaleQ == Scale::kBlock1x128;
  static constexpr bool kColumnBlocks =
      Config::kTransposed && Config::kScaleQt == Scale::kBlock1x128;
  static constexpr bool kTileBlocks = kUses<Scale::kBlock128x128> && !Config::kShard;
  static constexpr bool kRowAxis = Config::kRowMajor && Config::kScaleQ == Scale::kAxis;
  static constexpr bool kColumnAxis = Config::kTransposed && Config::kScaleQt == Scale::kAxis;
  // The amaxes may come as the amax kernel's per-tile partials.
  static constexpr bool kTilePartials =
      (kRowAxis || kColumnAxis) && (!kTensorScale || kDelayed) && Config::kInput != Input::kF32;
  static constexpr bool kTileAmax =
      kRowBlocks || kColumnBlocks || kTileBlocks || kDelayed || Config::kCount;

  static constexpr bool kAfterAmax =
      (kTensorScale && !kDelayed) || kRowAxis || kColumnAxis || Config::kShard;

  static F8_DEVICE float to_scale(u32 amax_bits) {
    if (Config::kSaturate && amax_bits >= 0x7F800000U) return 1.0F;
    return scale_from_amax<Config::kFormat, Config::kPow2>(amax_bits);
  }

  static F8_DEVICE float row_scale(const Scales& scales, u32 row_of_tile) {
    if constexpr (Config::kScaleQ == Scale::kTensor) return scales.tensor;
    if constexpr (Config::kScaleQ == Scale::kBlock128x128 && !Config::kShard) return scales.tile;
    return scales.row[row_of_tile];
  }
  static F8_DEVICE float column_scale(const Scales& scales, u32 column_of_tile) {
    if constexpr (Config::kScaleQt == Scale::kTensor) return scales.tensor;
    if constexpr (Config::kScaleQt == Scale::kBlock128x128) return scales.tile;
    return scales.column[column_of_tile];
  }

  static F8_DEVICE void publish_tensor_scale(const CastTensor& t, float scale) {
    t.scale[0] = scale;
    t.scale[kInverse] = inverse(scale);
  }

  static F8_DEVICE void tensor_scale(const CastTensor& t, bool first, Scales& scales) {
    __shared__ u32 warps[kTileThreads / 32];
    u32 most = 0;
    for (i32 i = static_cast<i32>(threadIdx.x); i < t.partial_count; i += kTileThreads) {
      most = max(most, load_global(t.partials + i));
    }
    const u32 warp_amax = warp_max(most);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = warp_amax;
    __syncthreads();
    if (threadIdx.x < 32) {
      const u32 amax = warp_max(threadIdx.x < kTileThreads / 32 ? warps[threadIdx.x] : 0);
      if (threadIdx.x == 0) {
        scales.tensor = to_scale(amax);
        if (first) {
          publish_tensor_scale(t, scales.tensor);
          if (t.amax != nullptr) atomicMax(t.amax, amax);
        }
      }
    }
  }

  // `tile_amax` is complete.
  static F8_DEVICE void delayed_scale(const CastTensor& t,
                                      const TileAmax<Config::kInput>& tile_amax, bool first,
                                      Scales& scales) {
    if (threadIdx.x != 0) return;
    scales.tensor = load_global(t.delayed);
    if (first) publish_tensor_scale(t, scales.tensor);
    if (t.amax != nullptr) atomicMax(t.amax, tile_amax.amax());
  }

  // The axis scales of the tile's rows and columns; the first tile of a row or column of tiles
  // writes their inverses. row_amax(i) and column_amax(i) give an amax as the bits of |x| as fp32.
  template <class RowAmax, class ColumnAmax>
  static F8_DEVICE void axis_scales(const CastTensor& t, i32 row0, i32 column0, RowAmax&& row_amax,
                                    ColumnAmax&& column_amax, Scales& scales) {
    const i32 i = static_cast<i32>(threadIdx.x) % kCastTile;
    if (threadIdx.x < kCastTile) {
      if constexpr (kRowAxis) {
        if (row0 + i < t.rows) {
          const float scale = to_scale(row_amax(i));
          scales.row[i] = scale;
          if (column0 == 0) t.inv_scale_row[row0 + i] = inverse(scale);
        }
      }
    } else {
      if constexpr (kColumnAxis) {
        if (column0 + i < t.cols) {
          const float scale = to_scale(column_amax(i));
          scales.column[i] = scale;
          if (row0 == 0) t.inv_scale_col[column0 + i] = inverse(scale);
        }
      }
    }
  }
  // `tile_amax` is complete.
  static F8_DEVICE void axis_scales(const CastTensor& t, i32 row0, i32 column0,
                                    const RowColumnAmax& whole, Scales& scales) {
    using Values = Vec8<Config::kInput>;
    axis_scales(
        t, row0, column0, [&](i32 i) { return Values::fp32_bits(whole.row(static_cast<u32>(i))); },
        [&](i32 i) { return Values::fp32_bits(whole.column(static_cast<u32>(i))); }, scales);
  }
  static F8_DEVICE void axis_scales(const CastTensor& t, const TileCoord& tile, i32 row0,
                                    i32 column0, Scales& scales) {
    if constexpr (kTilePartials) {
      if (t.tile_amax != nullptr) {
        __shared__ RowColumnAmax whole;
        whole.gather<kRowAxis, kColumnAxis>(t.tile_amax, tile);
        axis_scales(t, row0, column0, whole, scales);
        return;
      }
    }
    axis_scales(
        t, row0, column0, [&](i32 i) { return load_global(t.row_amax + row0 + i); },
        [&](i32 i) { return load_global(t.col_amax + column0 + i); }, scales);
  }

  // The scale of a 1x128 block in row `row` of a copy of `count` rows. The inverse is written, and
  // the padding behind the last row is zeroed. Those of the blocks of K lie `stride` apart.
  static F8_DEVICE float scale_1x128(u32 magnitude, float* inverses, i32 block, i32 row, i32 count,
                                     i64 stride) {
    const float scale = to_scale(Vec8<Config::kInput>::fp32_bits(magnitude));
    if (row < padded_scales(count)) {
      inverses[block * stride + row] = row < count ? inverse(scale) : 0;
    }
    return scale;
  }

  // Writes the inverse scale of the tile at (`row`, `column`) of a grid `columns` tiles wide, and
  // the padding behind the last column.
  static F8_DEVICE void publish_tile(float* inverses, i32 row, i32 column, i32 columns,
                                     float inverted) {
    const i64 stride = padded_scales(columns);
    inverses[row * stride + column] = inverted;
    if (column + 1 < columns) return;
    for (i64 i = columns; i < stride; ++i) inverses[row * stride + i] = 0;
  }

  // `tile_amax` is complete. `scale_rows`: the stride of q's 1x128 scales.
  static F8_DEVICE void block_scales(const CastTensor& t, const TileAmax<Config::kInput>& tile_amax,
                                     i32 row0, i32 column0, i64 scale_rows, Scales& scales) {
    const i32 i = static_cast<i32>(threadIdx.x) % kCastTile;
    const i32 tile_row = row0 / kCastTile;
    const i32 tile_column = column0 / kCastTile;
    if (kRowBlocks && threadIdx.x < kCastTile) {
      scales.row[i] = scale_1x128(tile_amax.row(threadIdx.x), t.inv_scale_row, tile_column,
                                  row0 + i, t.rows, scale_rows);
    }
    if (kColumnBlocks && threadIdx.x >= kCastTile) {
      scales.column[i] = scale_1x128(tile_amax.column(threadIdx.x % kCastTile), t.inv_scale_col,
                                     tile_row, column0 + i, t.cols, padded_scales(t.cols));
    }
    if (kTileBlocks && threadIdx.x == 0) {
      const float scale = to_scale(tile_amax.amax());
      scales.tile = scale;
      const float inverted = inverse(scale);
      if (Config::kRowMajor && Config::kScaleQ == Scale::kBlock128x128) {
        publish_tile(t.inv_scale_row, tile_row, tile_column, (t.cols + kCastTile - 1) / kCastTile,
                     inverted);
      }
      if (Config::kTransposed && Config::kScaleQt == Scale::kBlock128x128) {
        publish_tile(t.inv_scale_col, tile_column, tile_row, (t.rows + kCastTile - 1) / kCastTile,
                     inverted);
      }
    }
  }

  // The scales of a shard's tile, from the amaxes of the whole's blocks in its column of tiles.
  static F8_DEVICE void shard_scales(const CastTensor& t, i32 row0, i32 column0, Scales& scales) {
    const i32 across = (t.cols + kCastTile - 1) / kCastTile;
    const i32 down = (t.shard.whole + kCastTile - 1) / kCastTile;
    const i32 tile_column = column0 / kCastTile;
    const auto block_scale = [&](i32 row_of_blocks) {
      return to_scale(load_global(t.block_amax + i64{row_of_blocks} * across + tile_column));
    };
    const i32 i = static_cast<i32>(threadIdx.x);
    if (i < kCastTile && row0 + i < t.rows) {
      scales.row[i] = block_scale((t.shard.first + row0 + i) / kCastTile);
    }
    if (row0 > 0) return;
    for (i32 row = i; row < down; row += kTileThreads) {
      const float inverted = inverse(block_scale(row));
      if constexpr (Config::kRowMajor) {
        publish_tile(t.inv_scale_row, row, tile_column, across, inverted);
      }
      if constexpr (Config::kTransposed) {
        publish_tile(t.inv_scale_col, tile_column, row, down, inverted);
      }
    }
  }

  template <class Value>
  static F8_DEVICE void store(Value* to, const Value& value) {
    if constexpr (kStores == Evict::kFirst) {
      __stcs(to, value);
    } else {
      *to = value;
    }
  }

  static F8_DEVICE void write_vec8(u8* q, const Vec8<Config::kInput>& x, float scale) {
    u32 word[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      word[w] = pack_fp8<Config::kFormat>(x.value(4 * w) * scale, x.value(4 * w + 1) * scale) |
                pack_fp8<Config::kFormat>(x.value(4 * w + 2) * scale, x.value(4 * w + 3) * scale)
                    << 16;
    }
    store(reinterpret_cast<uint2*>(q), make_uint2(word[0], word[1]));
  }

  static F8_DEVICE void write_row_major(const CastTensor& t,
                                        const ThreadFragment<Config::kInput>& fragment,
                                        const Scales& scales) {
    if (fragment.column >= t.cols) return;
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if (fragment.row + i >= t.rows) break;
      const float scale = row_scale(scales, threadIdx.x / 16 * kFragment + i);
      write_vec8(t.q + (fragment.row + i) * t.ld_q + fragment.column, fragment.rows[i], scale);
    }
  }

  static F8_DEVICE void write_transposed(const CastTensor& t,
                                         const ThreadFragment<Config::kInput>& fragment,
                                         const Scales& scales, i32 row0, i32 column0) {
    __shared__ alignas(16) u8 tile[kCastTile * kCastTile];
    const u32 fragment_row = threadIdx.x / 16;
    const u32 fragment_column = threadIdx.x % 16;
    // Rows beyond the matrix become zero bytes whatever the scale is.
    const i32 inside = min(max(t.rows - fragment.row, 0), kFragment);
    const u64 mask = inside == kFragment ? ~u64{0} : (u64{1} << (8 * inside)) - 1;
#pragma unroll
    for (int c = 0; c < kFragment; ++c) {
      u32 word[2];
      if constexpr (Config::kShard) {
        const float* const scale = scales.row + fragment_row * kFragment;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          word[w] =
              pack_fp8<Config::kFormat>(fragment.rows[4 * w].value(c) * scale[4 * w],
                                        fragment.rows[4 * w + 1].value(c) * scale[4 * w + 1]) |
              pack_fp8<Config::kFormat>(fragment.rows[4 * w + 2].value(c) * scale[4 * w + 2],
                                        fragment.rows[4 * w + 3].value(c) * scale[4 * w + 3])
                  << 16;
        }
      } else {
        const float scale = column_scale(scales, fragment_column * kFragment + c);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          word[w] = pack_fp8<Config::kFormat>(fragment.rows[4 * w].value(c) * scale,
                                              fragment.rows[4 * w + 1].value(c) * scale) |
                    pack_fp8<Config::kFormat>(fragment.rows[4 * w + 2].value(c) * scale,
                                              fragment.rows[4 * w + 3].value(c) * scale)
                        << 16;
        }
      }
      const u32 position = fragment_row ^ fragment_column;
      *reinterpret_cast<uint2*>(tile + (fragment_column * kFragment + c) * kCastTile +
                                position * 8) =
          make_uint2(word[0] & static_cast<u32>(mask), word[1] & static_cast<u32>(mask >> 32));
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCastTile * 8 / kTileThreads; ++i) {
      const u32 c = threadIdx.x / 8 + i * (kTileThreads / 8);
      const u32 chunk = threadIdx.x % 8;  // of 16 rows
      const u32 position = chunk ^ (c / 16);
      uint4 bytes = *reinterpret_cast<const uint4*>(tile + c * kCastTile + position * 16);
      if (c / 8 % 2 != 0) bytes = make_uint4(bytes.z, bytes.w, bytes.x, bytes.y);
      const i64 column = column0 + static_cast<i32>(c);
      const i64 row = row0 + static_cast<i32>(chunk * 16);
      if (column < t.cols && row < t.ld_qt) {
        store(reinterpret_cast<uint4*>(t.qt + column * t.ld_qt + row), bytes);
      }
    }
  }

  // Adds a copy to its counters. `tile_amax` is complete.
  template <class ScaleAt>
  static F8_DEVICE void count_copy(const CastTensor& t,
                                   const ThreadFragment<Config::kInput>& fragment,
                                   const TileAmax<Config::kInput>& tile_amax, bool first,
                                   bool tensor_scale, float tensor, ScaleAt&& scale,
                                   CastCounters* counters) {
    if (threadIdx.x == 0) {
      atomicMax(&counters->amax, tile_amax.amax());
      if (first) {
        atomicAdd(&counters->elements, static_cast<u64>(t.rows) * static_cast<u64>(t.cols));
        if (tensor_scale) counters->scale = tensor;
      }
    }
    count_elements<Config::kFormat>(fragment, scale, counters);
  }
  // `counters` are those of q and of qt.
  static F8_DEVICE void count(const CastTensor& t, const ThreadFragment<Config::kInput>& fragment,
                              const TileAmax<Config::kInput>& tile_amax, const Scales& scales,
                              bool first, CastCounters* counters) {
    if constexpr (Config::kRowMajor) {
      count_copy(
          t, fragment, tile_amax, first, Config::kScaleQ == Scale::kTensor, scales.tensor,
          [&](int row, int) { return row_scale(scales, threadIdx.x / 16 * kFragment + row); },
          counters);
    }
    if constexpr (Config::kTransposed) {
      count_copy(
          t, fragment, tile_amax, first, Config::kScaleQt == Scale::kTensor, scales.tensor,
          [&](int row, int column) {
            if constexpr (Config::kShard) return scales.row[threadIdx.x / 16 * kFragment + row];
            return column_scale(scales, threadIdx.x % 16 * kFragment + column);
          },
          counters + 1);
    }
  }

  // A loader gives the elements that are cast: those of the tensor's x.
  struct Load {
    static F8_DEVICE void prefetch(const CastTensor& t, i32 row0, i32 column0) {
      prefetch_tile<Config::kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
    }
    static F8_DEVICE void load(const CastTensor& t, i32 row0, i32 column0,
                               ThreadFragment<Config::kInput>& fragment) {
      fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    }
  };

  template <class Args, class Loader = Load>
  static F8_DEVICE void run(const Args& args, const Loader& loader = {}) {
    const int index_of_tensor = tensor_of_block(args);
    const CastTensor& t = args.tensors[index_of_tensor];
    const i32 block = static_cast<i32>(blockIdx.x) - t.first_block;
    const i32 index = t.blocks - 1 - block;
    of_tile(args, index_of_tensor, TileCoord(t.rows, t.cols, index), index == 0, loader);
  }
  // Casts a tile of a tensor; the `first` one publishes the tensor's scale.
  template <class Args, class Loader>
  static F8_DEVICE void of_tile(const Args& args, int index_of_tensor, const TileCoord& tile,
                                bool first, const Loader& loader) {
    const CastTensor& t = args.tensors[index_of_tensor];
    const i32 row0 = tile.row * kCastTile;
    const i32 column0 = tile.column * kCastTile;
    if constexpr (!kAfterAmax && !Config::kNoopFlag) {
      loader.prefetch(t, row0, column0);
    }
    begin_overlapped(args.overlap);
    if (Config::kNoopFlag && is_noop(args.noop_flag)) return;
    ThreadFragment<Config::kInput> fragment;
    loader.load(t, row0, column0, fragment);
    __shared__ Scales scales;
    __shared__ TileAmax<Config::kInput> tile_amax;
    if (Config::kSums && args.sums != nullptr) {
      store_column_sums(fragment, column0, t.cols, args.sums + i64{tile.row} * t.cols);
    }
    if constexpr (kTileAmax) {
      constexpr bool kTile = kTileBlocks || kDelayed || Config::kCount;
      find_tile_amax<kRowBlocks, kColumnBlocks, kTile>(fragment, tile_amax);
      __syncthreads();
      block_scales(t, tile_amax, row0, column0, padded_scales(t.rows), scales);
      if constexpr (kDelayed) delayed_scale(t, tile_amax, first, scales);
    }
    if constexpr (kTensorScale && !kDelayed) tensor_scale(t, first, scales);
    if constexpr (Config::kShard) shard_scales(t, row0, column0, scales);
    axis_scales(t, tile, row0, column0, scales);
    __syncthreads();
    if constexpr (kDelayed && !Config::kSaturate) {
      if (tile_amax.amax() >= 0x7F800000U) fragment.infinities_to_nan();
    }
    if constexpr (Config::kRowMajor) write_row_major(t, fragment, scales);
    if constexpr (Config::kTransposed) write_transposed(t, fragment, scales, row0, column0);
    if constexpr (Config::kCount) {
      CastCounters* counters = args.counters[index_of_tensor];
      if (counters != nullptr) count(t, fragment, tile_amax, scales, first, counters);
    }
    end_overlapped();
  }
};

}  // namespace f8::kernels
