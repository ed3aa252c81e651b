// The epilogue of the GEMM: a consumer warpgroup applies the inverse scales and the bias to its
// sums of a tile, takes their amax, rounds them, stages them in swizzled shared memory, and stores
// boxes of 64 rows by TMA (or adds them to d). With kPow2 the sums are rounded first and then
// multiplied by their scales two at a time, in bf16, which is exact.
//
// Rows and columns beyond d are not written: TMA leaves them out. With groups, rows beyond a tile's
// group are the next group's: the box that has some leaves by ordinary stores of the others.
#pragma once

#include "codegen/kernels/gemm/gemm_traits.cuh"

namespace f8::kernels {

template <class Config>
struct GemmEpilogue {
  using Traits = GemmTraits<Config>;
  using Schedule = typename Traits::Schedule;
  using Operands = typename Traits::EpilogueOperands;
  using Shared = GemmShared<Config>;

  // The position of a thread's values in an MMA tile: rows warp_row + lane / 4 and + 8.
  struct Thread {
    u32 lane;
    u32 warp_row;
  };

  // Scales of this thread's rows: 2 in each 64.
  struct RowScales {
    float value[Traits::kMmaTilesM][2];
    u32 packed[Traits::kMmaTilesM][2];  // with kPow2: bf16, twice

    F8_DEVICE void load(const Shared& shared, u32 buffer, const Thread& thread, u32 first_row,
                        float tensor_scale) {
#pragma unroll
      for (int i = 0; i < Traits::kMmaTilesM * 2; ++i) {
        value[i / 2][i % 2] = tensor_scale;
        if constexpr (Operands::kAxisScale) {
          const u32 row = first_row + i / 2 * 64 + i % 2 * 8 + thread.warp_row + thread.lane / 4;
          const float x = load_shared(shared.operands.rows(buffer) + row * 4);
          value[i / 2][i % 2] = x;
          if constexpr (Config::kPow2) packed[i / 2][i % 2] = pack_bf16(x, x);
        }
      }
    }
  };

  // Scales and bias of this thread's columns in one box: 2 in each 8.
  struct ColumnOperands {
    static constexpr int kGroups = Traits::kOutColumns / 8;
    float2 scale[kGroups];
    u32 packed[kGroups];  // with kPow2: bf16 pairs
    float2 bias[kGroups];
  };

  // A thread's 8 values of 16 columns of a box: 2 groups of 8 columns, in each 2 rows of 2 columns.
  static constexpr int kGroups = 2;
  using Values = float[4 * kGroups];

  // Byte offset of a 16-byte chunk in an out buffer after its swizzle.
  static F8_DEVICE u32 out_address(u32 out, u32 row, u32 chunk) {
    constexpr u32 kRowsOfSwizzle = 128 / Traits::kOutRowBytes;  // neighbours with the same swizzle
    const u32 at = chunk ^ (row / kRowsOfSwizzle % (Traits::kOutRowBytes / 16));
    return out + row * Traits::kOutRowBytes + at * 16;
  }

  static F8_DEVICE u32 pack(float low, float high) {
    return Config::kHalfOutput ? pack_f16(low, high) : pack_bf16(low, high);
  }

  // Scale, bias and amax of the 16 columns number j of a box.
  template <class Sums>
  static F8_DEVICE void finish(Values& value, const Sums& sums, const RowScales& rows,
                               const ColumnOperands& columns, const GemmProblem& problem, int mma_m,
                               int box, int j, i32 row0, i32 column0, const Thread& thread,
                               u32& amax) {
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      value[i] = sums.at(mma_m, box * Traits::kOutColumns + j * 16 + i / 4 * 8)[i % 4];
      if constexpr (Operands::kFloatColumns) {
        const float2 pair = columns.scale[j * kGroups + i / 4];
        value[i] *= rows.value[mma_m][i / 2 % 2] * (i % 2 == 0 ? pair.x : pair.y);
      } else if constexpr (Config::kScale == Scale::kTensor) {
        value[i] *= rows.value[mma_m][i / 2 % 2];
      }
      if constexpr (Config::kBias) {
        const float2 shift = columns.bias[j * kGroups + i / 4];
        value[i] += i % 2 == 0 ? shift.x : shift.y;
      }
      if constexpr (Config::kAmax) {
        const i32 row =
            row0 + static_cast<i32>(thread.warp_row + thread.lane / 4 + 8 * (i / 2 % 2));
        const bool inside = row < static_cast<i32>(problem.m) &&
                            column0 + j * 16 + i / 4 * 8 < static_cast<i32>(problem.n);
        if (inside) amax = max(amax, __float_as_uint(value[i]) & 0x7FFFFFFFU);
      }
    }
  }

  // Rounds the 16 columns number j to d's type and stages them in an out buffer.
  static F8_DEVICE void stage(const Values& value, const RowScales& rows,
                              const ColumnOperands& columns, u32 out, int mma_m, int j,
                              const Thread& thread) {
    const auto [lane, warp_row] = thread;
    if constexpr (Config::kFloatOutput) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // i: column group of 8, row group of 8
        const u32 r = warp_row + lane / 4 + 8 * (i % 2);
        const u32 chunk = j * 4 + i / 2 * 2 + lane % 4 / 2;
        store_shared(out_address(out, r, chunk) + lane % 2 * 8, value[i / 2 * 4 + i % 2 * 2],
                     value[i / 2 * 4 + i % 2 * 2 + 1]);
      }
    } else {
      const u32 r = warp_row + lane % 16;
      const u32 chunk = j * 2 + lane / 16;
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // i: column group of 8, row group of 8
        pairs[i] = pack(value[2 * i], value[2 * i + 1]);
        if constexpr (Config::kPow2) {
          pairs[i] = multiply_bf16(pairs[i], columns.packed[j * kGroups + i / 2]);
          pairs[i] = multiply_bf16(pairs[i], rows.packed[mma_m][i % 2]);
        }
      }
      stmatrix_x4(out_address(out, r, chunk), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  // `matrix`: of the group, where each has a d.
  template <class... Matrix>
  static F8_DEVICE void store_box(const TensorMap* map_d, u32 out, i32 column, i32 row,
                                  Matrix... matrix) {
    if constexpr (Config::kAdd) {
      tma_reduce_add(map_d, out, column, row, matrix...);
    } else {
      tma_store(map_d, out, column, row, matrix...);
    }
  }

  // Writes the first `rows` rows of a staged box.
  static F8_DEVICE void store_rows(const Schedule& schedule, u32 out, i32 row0, i32 rows,
                                   i32 column0) {
    constexpr i32 kChunks = Traits::kOutRowBytes / 16;  // of a row
    constexpr i32 kElementBytes = Config::kFloatOutput ? 4 : 2;
    const i32 row_bytes = static_cast<i32>(schedule.args.problems[0].n) * kElementBytes;
    for (i32 i = static_cast<i32>(threadIdx.x % 128); i < rows * kChunks; i += 128) {
      const i32 at = column0 * kElementBytes + i % kChunks * 16;
      if (at >= row_bytes) continue;
      u32 words[4];
      load_shared_words(out_address(out, i / kChunks, i % kChunks), words);
      const u64 row = static_cast<u64>(row0 + i / kChunks) * schedule.grouped.ld_d;
      store_global_words(static_cast<u8*>(schedule.grouped.d) + row + at, words);
    }
  }

  // Writes this warpgroup's rows of the tile, box by box. `tensor_scale` is the product of the
  // operands' inverse tensor scales.
  template <class Sums>
  static F8_DEVICE void store_tile(const Sums& sums, const Shared& shared,
                                   const typename Traits::Maps& maps, const Schedule& schedule,
                                   u32 warpgroup, const WorkTile& tile, float tensor_scale,
                                   u32 operands_phase, u32& out_buffer, u32& amax) {
    const GemmProblem& problem = schedule.args.problems[tile.problem];
    const TensorMap* map_d = &maps.problems[tile.problem].d;
    const u32 index = threadIdx.x % 128;
    const Thread thread = {index % 32, index / 32 * 16};
    const u32 first_row = Traits::first_row(warpgroup);
    const u32 first_column = schedule.rank_k * Sums::kColumns;  // of the tile
    const u32 operands = Config::kPingpong ? warpgroup : 0;
    shared.operands.wait(operands, operands_phase);
    RowScales rows;
    rows.load(shared, operands, thread, first_row, tensor_scale);
#pragma unroll
    for (int box = 0; box < Sums::kColumns / Traits::kOutColumns; ++box) {
      const u32 in_tile = first_column + box * Traits::kOutColumns;
      const i32 column0 = tile.column + static_cast<i32>(in_tile);
      if (column0 >= static_cast<i32>(problem.n)) break;
      ColumnOperands columns;
      if constexpr (Config::kPow2) {
#pragma unroll
        for (int i = 0; i < ColumnOperands::kGroups; i += 4)
          shared.operands.packed_columns(operands, in_tile + i * 8, columns.packed + i);
      }
#pragma unroll
      for (int i = 0; i < ColumnOperands::kGroups; ++i) {
        const u32 at = (in_tile + i * 8 + thread.lane % 4 * 2) * 4;
        if constexpr (Operands::kFloatColumns)
          columns.scale[i] = load_shared_pair(shared.operands.columns(operands) + at);
        if constexpr (Config::kBias)
          columns.bias[i] = load_shared_pair(shared.operands.bias(operands) + at);
      }
#pragma unroll
      for (int mma_m = 0; mma_m < Traits::kMmaTilesM; ++mma_m) {
        const i32 row0 = tile.row + static_cast<i32>(first_row) + mma_m * 64;
        if (row0 >= static_cast<i32>(schedule.end_row(tile))) break;
        const u32 out =
            shared.out + (warpgroup * Config::kOutBuffers + out_buffer) * Traits::kOutBufferBytes;
        out_buffer = (out_buffer + 1) % Config::kOutBuffers;
        if (index == 0) tma_store_wait_read<Config::kOutBuffers - 1>();
        warpgroup_sync(1 + warpgroup);
#pragma unroll
        for (int j = 0; j < Traits::kOutColumns / 16; ++j) {
          Values value;
          finish(value, sums, rows, columns, problem, mma_m, box, j, row0, column0, thread, amax);
          stage(value, rows, columns, out, mma_m, j, thread);
        }
        fence_async_proxy();
        warpgroup_sync(1 + warpgroup);
        if constexpr (Config::kGroup == Group::kM) {
          if (row0 + kOutRows > tile.end_row) {
            store_rows(schedule, out, row0, tile.end_row - row0, column0);
            if (index == 0) tma_store_commit();  // an empty group: each box has one
            continue;
          }
        }
        if (index == 0) {
          if constexpr (Config::kGroup == Group::kK) {
            store_box(map_d, out, column0, row0, tile.group);
          } else {
            store_box(map_d, out, column0, row0);
          }
          tma_store_commit();
        }
      }
    }
    shared.operands.release(operands);
    if constexpr (Config::kAmax) raise_amax(problem, amax);
  }

  static F8_DEVICE void raise_amax(const GemmProblem& problem, u32& amax) {
    const u32 most = warp_max(amax);
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax(problem.amax, most);
    amax = 0;
  }
};

}  // namespace f8::kernels
