// Launches that take matrices from high precision to fp8: the amax launch and the cast launch, each
// over up to kernels::kMaxTensors matrices at once, or kernels::kMaxListed with the list kernels.
// Plain pointers into the caller's memory describe the operands; nothing is owned.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/device/launch.hpp"

namespace f8::runtime {

// A matrix x[rows][cols] and where its maxima, copies and scales go. Which pointers matter
// is the kernels' specs' to say.
//
// Block scales of a copy with r rows of c elements: block1x128 [ceil(c/128)][padded_scales(r)],
// block128x128 [ceil(r/128)][padded_scales(ceil(c/128))].
struct QuantizeOperand {
  const void* x = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;                 // of x, elements, whole 16 bytes; 0: dense
  uint32_t* partials = nullptr;   // tensor: amax_partials() words; with an axis amax: 1, zeroed
  uint16_t* tile_amax = nullptr;  // axis, where fits_tile_amax(): tile_amax_bytes(), 8-byte aligned
  uint32_t* row_amax = nullptr;   // axis without tile_amax: [rows], zeroed before the amax launch
  uint32_t* col_amax = nullptr;   // axis without tile_amax: [cols], likewise
  uint8_t* q = nullptr;           // [rows][row_pitch(cols)]
  uint8_t* qt = nullptr;          // [cols][row_pitch(rows)]
  float* scale = nullptr;         // tensor: [0] and, at [kernels::kInverse], its inverse
  float* inv_row = nullptr;       // axis: [rows], of q's rows; blocks: of q
  float* inv_col = nullptr;       // axis: [cols], of qt's rows; blocks: of qt
  const float* delayed = nullptr;     // delayed: the scale to cast with
  uint32_t* recorded_amax = nullptr;  // delayed, tensor: raised to the matrix's amax, or null
  kernels::CastCounters* counters = nullptr;  // casts that count: [2], q's and qt's, or null
  // A shard, some rows of a whole: the amaxes of the whole's 128x128 blocks, which the caller zeroes
  // before the amax launch. Block scales are those of the whole then.
  uint32_t* block_amax = nullptr;
  int64_t first_row = 0;  // of the whole
  int64_t whole_rows = 0;
};

// How matrices go through the kernels of a cast that needs amaxes: all of them by one launch of the
// one-launch kernel; each by one of its own; or all by an amax launch and a cast launch.
enum class Launches { kOne, kOneEach, kTwo };
// Says how to launch the one-launch kernel of `spec` on a device of `sm_count` SMs. The kernel
// takes what is resident at once, and no more strips of tiles than its workspace holds if rows or
// columns have scales. If both ways fit, this is the one that was measured faster
// (docs/kernels.md).
[[nodiscard]] Launches quantize_launches(const codegen::CastSpec& spec, int sm_count,
                                         std::span<const QuantizeOperand> operands);
// Blocks of one-launch kernels that are resident at once, on `sm_count` SMs.
[[nodiscard]] int64_t resident_quantize_blocks(int sm_count);
// Tells whether the amax launch of a matrix may leave the maxima of each tile's rows and columns
// (tile_amax.cuh) for the cast launch to combine, which needs no amax buffer to clear and no
// atomics. It may where rows and columns alone have scales, and a tile reads those of few enough
// others. What fits with some rows fits with fewer.
[[nodiscard]] bool fits_tile_amax(const codegen::AmaxSpec& spec, int64_t rows, int64_t cols);
// The bytes of these for a matrix with up to `rows` rows: 0 where fits_tile_amax() never holds.
[[nodiscard]] size_t tile_amax_bytes(const codegen::AmaxSpec& spec, int64_t rows, int64_t cols);

// The bytes that one-launch kernels keep in a workspace: for as many tiles as may fit and, from
// second_sync() on, for a launch that overlaps with another, both with one tile a block at most.
[[nodiscard]] size_t quantize_sync_bytes(int sm_count);
[[nodiscard]] size_t second_sync(int sm_count);

// Floats of a tensor's scale and its inverse, or of the inverse scales of a copy [rows][cols].
[[nodiscard]] int64_t scale_floats(codegen::ScaleMode mode, int64_t rows, int64_t cols);

// Blocks, and so partial maxima, of a tensor amax of a matrix alone in its launch. Beside others it
// has its share of them by size, and a matrix with fewer rows has no more.
[[nodiscard]] int32_t amax_partials(int64_t rows, int64_t cols, int sm_count);
// Tiles of the row, column and cast kernels.
[[nodiscard]] int64_t cast_tiles(int64_t rows, int64_t cols);

// Args: the kernel's, kernels::AmaxListArgs and CastListArgs where the spec is for a list.
template <class Args = kernels::AmaxArgs>
[[nodiscard]] Args amax_args(const codegen::AmaxSpec& spec, int sm_count,
                             std::span<const QuantizeOperand> operands);
template <class Args = kernels::CastArgs>
[[nodiscard]] Args cast_args(const codegen::CastSpec& spec, int sm_count,
                             std::span<const QuantizeOperand> operands);

// Amax and cast in one launch; `sync` as quantize.cuh says, quantize_sync_bytes() long.
[[nodiscard]] kernels::QuantizeArgs quantize_args(const codegen::CastSpec& spec, int sm_count,
                                                  std::span<const QuantizeOperand> operands,
                                                  void* sync);

template <class Args>
[[nodiscard]] int64_t blocks_of(const Args& args) {
  const auto& last = args.tensors[args.count - 1];
  return int64_t{last.first_block} + last.blocks;
}
template <class Args>
[[nodiscard]] Status launch_amax(const Driver& driver, const Kernel& kernel, const Args& args,
                                 bool programmatic, Stream stream) {
  return launch_with(args, driver, kernel, blocks_of(args), programmatic, stream);
}
// If `args.overlap` is set, or will be in the next launch, `overlapped_blocks` are the other's
// blocks.
template <class Args>
[[nodiscard]] Status launch_cast(const Driver& driver, const Kernel& kernel, const Args& args,
                                 bool programmatic, Stream stream, int64_t overlapped_blocks = 0) {
  return launch_with(args, driver, kernel, blocks_of(args), programmatic, stream,
                     overlapped_blocks);
}
[[nodiscard]] Status launch_quantize(const Driver& driver, const Kernel& kernel,
                                     const kernels::QuantizeArgs& args, bool programmatic,
                                     Stream stream, int64_t overlapped_blocks = 0);

}  // namespace f8::runtime
