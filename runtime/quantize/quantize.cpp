// Filling in and launching the amax and cast kernels.
#include "runtime/quantize/quantize.hpp"

#include <algorithm>

#include "recipes/fp8_layout.hpp"

namespace f8::runtime {
namespace {

constexpr int64_t kElementsPerBlock =
    256 * 64;                           // below this a block of the tensor amax is not worth it
constexpr int64_t kMaxPartials = 1024;  // every block of the cast reads them all
constexpr int64_t kBlocksPerSm = 6;
// The most tiles in a row and a column of tiles, together, whose per-tile amax partials a tile of
// the cast reads. Beyond that, reading 256 bytes of each costs more than clearing and raising the
// words of an amax buffer.
constexpr int64_t kMaxTileAmaxPeers = 80;

int64_t pairs_of_tiles(int64_t rows, int64_t cols) {
  return kernels::pairs_of_tiles(ceil_div(cols, kernels::kCastTile),
                                 ceil_div(rows, kernels::kCastTile));
}

// The partial maxima of a matrix in a launch over `elements` in all.
int32_t partials_in_launch(const QuantizeOperand& x, double elements, int sm_count) {
  const double share = static_cast<double>(x.rows) * static_cast<double>(x.cols) / elements *
                       static_cast<double>(kBlocksPerSm * sm_count);
  return std::min(amax_partials(x.rows, x.cols, sm_count),
                  std::max(static_cast<int32_t>(share), 1));
}

double elements_of(std::span<const QuantizeOperand> operands) {
  double elements = 0;
  for (const QuantizeOperand& x : operands) {
    elements += static_cast<double>(x.rows) * static_cast<double>(x.cols);
  }
  return elements;
}

// Sets what amax and cast kernels have in common; `first` becomes the next matrix's first block.
template <class Tensor>
void set_matrix(Tensor& to, const QuantizeOperand& from, bool shard, int64_t blocks,
                int32_t& first) {
  to.x = from.x;
  to.ld = from.ld == 0 ? from.cols : from.ld;
  to.rows = static_cast<int32_t>(from.rows);
  to.cols = static_cast<int32_t>(from.cols);
  if (shard) {
    to.shard = {.first = static_cast<int32_t>(from.first_row),
                .whole = static_cast<int32_t>(from.whole_rows)};
    to.block_amax = from.block_amax;
  } else {
    to.row_amax = from.row_amax;
    to.col_amax = from.col_amax;
  }
  to.first_block = first;
  to.blocks = static_cast<int32_t>(blocks);
  first += to.blocks;
}

}  // namespace

int32_t amax_partials(int64_t rows, int64_t cols, int sm_count) {
  const int64_t wanted = ceil_div(rows * cols, kElementsPerBlock);
  const int64_t resident = kBlocksPerSm * sm_count;
  return static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, std::min(resident, kMaxPartials)));
}

int64_t cast_tiles(int64_t rows, int64_t cols) {
  return ceil_div(rows, kernels::kCastTile) * ceil_div(cols, kernels::kCastTile);
}

Launches quantize_launches(const codegen::CastSpec& spec, int sm_count,
                           std::span<const QuantizeOperand> operands) {
  if (codegen::scales_rows_alone(spec)) return Launches::kOne;
  const int64_t blocks = resident_quantize_blocks(sm_count);
  const bool axis = has_scale(spec, codegen::ScaleMode::kAxis);
  int64_t all_pairs = 0;
  int64_t strips = 0;
  bool each = true;
  for (const QuantizeOperand& operand : operands) {
    const int64_t down = ceil_div(operand.rows, kernels::kCastTile);
    const int64_t across = ceil_div(operand.cols, kernels::kCastTile);
    const int64_t pairs = pairs_of_tiles(operand.rows, operand.cols);
    all_pairs += pairs;
    strips += down + across;
    each = each && pairs <= blocks && (!axis || down + across <= kernels::kMaxStrips);
  }
  if (all_pairs <= blocks && (!axis || strips <= kernels::kMaxStrips)) {
    return Launches::kOne;
  }
  return each ? Launches::kOneEach : Launches::kTwo;
}

int64_t resident_quantize_blocks(int sm_count) {
  return int64_t{codegen::kQuantizeBlocksPerSm} * sm_count;
}

bool fits_tile_amax(const codegen::AmaxSpec& spec, int64_t rows, int64_t cols) {
  return (spec.row || spec.col) && !spec.tensor && spec.in != Dtype::kF32 &&
         ceil_div(rows, kernels::kCastTile) + ceil_div(cols, kernels::kCastTile) <=
             kMaxTileAmaxPeers;
}

size_t tile_amax_bytes(const codegen::AmaxSpec& spec, int64_t rows, int64_t cols) {
  const int64_t across = ceil_div(cols, kernels::kCastTile);
  const int64_t down = std::min(ceil_div(rows, kernels::kCastTile), kMaxTileAmaxPeers - across);
  if (down < 1 || !fits_tile_amax(spec, down * kernels::kCastTile, cols)) return 0;
  return static_cast<size_t>(across * down * kernels::kTileAmaxSize) * sizeof(kernels::u16);
}

size_t second_sync(int sm_count) {
  return static_cast<size_t>(
      kernels::quantize_sync_bytes(resident_quantize_blocks(sm_count) * kernels::kMaxTilesOfBlock));
}

size_t quantize_sync_bytes(int sm_count) {
  return second_sync(sm_count) +
         static_cast<size_t>(kernels::quantize_sync_bytes(resident_quantize_blocks(sm_count)));
}

int64_t scale_floats(codegen::ScaleMode mode, int64_t rows, int64_t cols) {
  switch (mode) {
    case codegen::ScaleMode::kTensor:
      return kernels::kInverse + 1;
    case codegen::ScaleMode::kAxis:
      return rows;
    case codegen::ScaleMode::kBlock1x128:
      return ceil_div(cols, kernels::kCastTile) * kernels::padded_scales(rows);
    case codegen::ScaleMode::kBlock128x128:
      return ceil_div(rows, kernels::kCastTile) *
             kernels::padded_scales(ceil_div(cols, kernels::kCastTile));
  }
  return 0;
}

template <class Args>
Args amax_args(const codegen::AmaxSpec& spec, int sm_count,
               std::span<const QuantizeOperand> operands) {
  Args args{};
  const double elements = elements_of(operands);
  args.count = static_cast<int32_t>(operands.size());
  int32_t first = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    const QuantizeOperand& from = operands[i];
    kernels::AmaxTensor& to = args.tensors[i];
    to.partials = from.partials;
    to.tile_amax = from.tile_amax;
    set_matrix(to, from, spec.block,
               spec.row || spec.col || spec.block ? cast_tiles(from.rows, from.cols)
                                                  : partials_in_launch(from, elements, sm_count),
               first);
  }
  return args;
}

template <class Args>
Args cast_args(const codegen::CastSpec& spec, int sm_count,
               std::span<const QuantizeOperand> operands) {
  Args args{};
  const double elements = elements_of(operands);
  const std::optional<codegen::AmaxSpec> amax = amax_before(spec);
  args.count = static_cast<int32_t>(operands.size());
  int32_t first = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    const QuantizeOperand& from = operands[i];
    kernels::CastTensor& to = args.tensors[i];
    to.q = spec.q ? from.q : nullptr;
    to.ld_q = row_pitch(from.cols);
    to.qt = spec.qt ? from.qt : nullptr;
    to.ld_qt = row_pitch(from.rows);
    if (amax && amax->tensor) {
      to.partials = from.partials;
      to.partial_count = amax->row || amax->col ? 1 : partials_in_launch(from, elements, sm_count);
    } else {
      to.tile_amax = from.tile_amax;
    }
    to.delayed = from.delayed;
    to.amax = from.recorded_amax;
    to.scale = from.scale;
    to.inv_scale_row = from.inv_row;
    to.inv_scale_col = from.inv_col;
    args.counters[i] = from.counters;
    set_matrix(to, from, spec.shard,
               spec.one_launch && codegen::scales_rows_alone(spec)
                   ? kernels::blocks_of_rows(from.rows, from.cols)
                   : cast_tiles(from.rows, from.cols),
               first);
  }
  return args;
}

kernels::QuantizeArgs quantize_args(const codegen::CastSpec& spec, int sm_count,
                                    std::span<const QuantizeOperand> operands, void* sync) {
  return {.cast = cast_args(spec, sm_count, operands), .sync = static_cast<kernels::u64*>(sync)};
}

template kernels::AmaxArgs amax_args(const codegen::AmaxSpec&, int,
                                     std::span<const QuantizeOperand>);
template kernels::AmaxListArgs amax_args(const codegen::AmaxSpec&, int,
                                         std::span<const QuantizeOperand>);
template kernels::CastArgs cast_args(const codegen::CastSpec&, int,
                                     std::span<const QuantizeOperand>);
template kernels::CastListArgs cast_args(const codegen::CastSpec&, int,
                                         std::span<const QuantizeOperand>);
Status launch_quantize(const Driver& driver, const Kernel& kernel,
                       const kernels::QuantizeArgs& args, bool programmatic, Stream stream,
                       int64_t overlapped_blocks) {
  int64_t blocks = blocks_of(args.cast);
  if (kernel.cooperative && blocks > resident_quantize_blocks(kernel.resident_clusters)) {
    blocks = 0;
    for (int32_t i = 0; i < args.cast.count; ++i) {
      blocks += pairs_of_tiles(args.cast.tensors[i].rows, args.cast.tensors[i].cols);
    }
  }
  return launch_with(args, driver, kernel, blocks, programmatic, stream, overlapped_blocks);
}

}  // namespace f8::runtime
