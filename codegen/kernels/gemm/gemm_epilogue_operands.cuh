// Epilogue operands: what the epilogue of a tile reads for each row and column, which is the
// inverse axis scales and the bias. The second producer warp loads them while the tile's MMAs run.
//
// Shared memory (operands of gemm_layout.cuh):
//   kBuffers x { scales of a: kTileM floats, of b: kTileN floats }   with axis scales alone
//              (of b with kPow2: kTileN bf16, two neighbours in a word, ordered by packed_word())
//              { bias: kTileN floats }                               with a bias alone
//   kBuffers x { full barrier, empty barrier }
#pragma once

#include "codegen/kernels/gemm/gemm_schedule.cuh"

namespace f8::kernels {

template <class Config>
struct GemmEpilogueOperands {
  static constexpr bool kAxisScale = Config::kScale == Scale::kAxis;
  static constexpr bool kFloatColumns = kAxisScale && !Config::kPow2;
  static constexpr bool kUsed = kAxisScale || Config::kBias;
  // With ping-pong each consumer warpgroup has a buffer of its own.
  static constexpr u32 kBuffers = kGemmLayout<Config>.operand_buffers();
  static constexpr u32 kFloats = kGemmLayout<Config>.operand_floats();

  u32 floats;
  u32 barriers;

  F8_DEVICE explicit GemmEpilogueOperands(u32 smem)
      : floats(smem), barriers(smem + kBuffers * kFloats * 4) {}

  F8_DEVICE u32 rows(u32 buffer) const { return floats + buffer * kFloats * 4; }
  F8_DEVICE u32 columns(u32 buffer) const { return rows(buffer) + Config::kTileM * 4; }
  F8_DEVICE u32 bias(u32 buffer) const { return rows(buffer) + (kFloats - Config::kTileN) * 4; }
  F8_DEVICE u32 full(u32 buffer) const { return barriers + buffer * 16; }
  F8_DEVICE u32 empty(u32 buffer) const { return full(buffer) + 8; }

  // The word of columns 2 pair and 2 pair + 1: a thread reads its pairs of four groups of 8 columns
  // at once.
  static F8_DEVICE u32 packed_word(u32 pair) {
    const u32 group = pair / 4;
    return group / 4 * 16 + pair % 4 * 4 + group % 4;
  }
  // This thread's words of the four groups of 8 that begin at `column` of the tile.
  F8_DEVICE void packed_columns(u32 buffer, u32 column, u32* words) const {
    load_shared_words(columns(buffer) + column * 2 + threadIdx.x % 4 * 16, words);
  }

  // `readers`: the threads that share a tile.
  F8_DEVICE void init(u32 readers) const {
    for (u32 i = 0; kUsed && i < kBuffers; ++i) {
      barrier_init(full(i), 32);
      barrier_init(empty(i), readers);
    }
  }

  static F8_DEVICE float load_bias(const void* bias, u32 column) {
    if constexpr (Config::kFloatOutput) {
      return load_global(static_cast<const float*>(bias) + column);
    } else {
      const u32 bits = load_global(static_cast<const u16*>(bias) + column);
      if constexpr (!Config::kHalfOutput) return __uint_as_float(bits << 16);
      float value;
      asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
      return value;
    }
  }

  // The producer warp loads the operands of the CTA's tile number `count`. The loads in flight are
  // few, since the warp has few registers.
  static constexpr int kLoads = Config::kProblems > 1 ? 2 : 4;
  template <class Schedule>
  F8_DEVICE void load(const Schedule& schedule, const WorkTile& tile, u32 count) const {
    const u32 buffer = count % kBuffers;
    barrier_wait(empty(buffer), (count / kBuffers % 2) ^ 1);
    const u32 lane = threadIdx.x % 32;
    const GemmProblem& problem = schedule.args.problems[tile.problem];
    if constexpr (kAxisScale) {
#pragma unroll kLoads
      for (u32 i = lane; i < Config::kTileM; i += 32) {
        const u32 row = tile.row + i;
        const float x = row < schedule.end_row(tile)
                            ? load_global(schedule.inv_scale_a(tile) + row * problem.stride_a)
                            : 0.0F;
        store_shared(rows(buffer) + i * 4, x);
      }
    }
#pragma unroll kLoads
    for (u32 i = lane; i < Config::kTileN; i += 32) {
      const u32 column = tile.column + i;
      const bool inside = column < problem.n;
      if constexpr (kFloatColumns) {
        const float x =
            inside ? load_global(schedule.inv_scale_b(tile) + column * problem.stride_b) : 0.0F;
        store_shared(columns(buffer) + i * 4, x);
      }
      if constexpr (Config::kBias) {
        store_shared(bias(buffer) + i * 4, inside ? load_bias(problem.bias, column) : 0.0F);
      }
    }
    if constexpr (Config::kPow2) {
#pragma unroll kLoads
      for (u32 pair = lane; pair < Config::kTileN / 2; pair += 32) {
        const u32 column = tile.column + 2 * pair;
        const float* scales = schedule.inv_scale_b(tile) + column * problem.stride_b;
        const float x = column < problem.n ? load_global(scales) : 0.0F;
        const float y = column + 1 < problem.n ? load_global(scales + problem.stride_b) : 0.0F;
        store_shared(columns(buffer) + packed_word(pair) * 4, pack_bf16(x, y));
      }
    }
    barrier_arrive(full(buffer));
  }

  // Every reader waits before it reads, and releases the buffer after.
  F8_DEVICE void wait(u32 buffer, u32 parity) const {
    if constexpr (kUsed) barrier_wait(full(buffer), parity);
  }
  F8_DEVICE void release(u32 buffer) const {
    if constexpr (kUsed) barrier_arrive(empty(buffer));
  }
};

}  // namespace f8::kernels
