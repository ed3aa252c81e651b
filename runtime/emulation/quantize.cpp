// The amax and cast kernels as loops over their arguments.
#include <algorithm>
#include <bit>
#include <cmath>
#include <span>
#include <utility>

#include "base/format.hpp"
#include "recipes/reference/reference.hpp"
#include "recipes/scales/scale.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/column_sums.hpp"
#include "runtime/emulation/kernels.hpp"
#include "runtime/emulation/reserved_bytes.hpp"

namespace f8::runtime::emulation {
namespace {

using codegen::ScaleMode;
using kernels::kCastTile;
using reference::AmaxOver;
using reference::Matrix;

template <class... Args>
void fault(Faults& faults, fmt::format_string<Args...> format, Args&&... args) {
  faults.push_back(f8::format(format, std::forward<Args>(args)...));
}

bool aligned(const void* p, size_t bytes) {
  return p != nullptr && reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

uint32_t magnitude(float v) {
  return std::bit_cast<uint32_t>(v) & 0x7fffffffU;
}

void raise(uint32_t& word, uint32_t bits) {
  word = std::max(word, bits);
}

// Gives the bits of an element of a 16-bit type.
template <class Spec>
uint16_t load_half(const Spec& spec, const void* x, int64_t i) {
  if (!spec.from_f32) return static_cast<const uint16_t*>(x)[i];
  uint16_t bits = 0;
  store_element(&bits, 0, static_cast<const float*>(x)[i], spec.in);
  return bits;
}

// Gives an element, rounded where the kernel rounds it.
template <class Spec>
float load_value(const Spec& spec, const void* x, int64_t i) {
  if (!spec.from_f32) return load_element(x, i, spec.in);
  const uint16_t bits = load_half(spec, x, i);
  return load_element(&bits, 0, spec.in);
}

// Per-tile amaxes are magnitudes of the elements' own 16-bit type.
void raise_amax(uint16_t& amax, uint16_t bits) {
  amax = std::max(amax, static_cast<uint16_t>(bits & 0x7fffU));
}

template <class Args>
void check_blocks(const Args& args, Dtype in, unsigned grid, Faults& faults) {
  int next = 0;
  for (int i = 0; i < args.count; ++i) {
    const auto& t = args.tensors[i];
    if (t.first_block != next) fault(faults, "tensor {}: first block {}", i, t.first_block);
    if (t.blocks < 1) fault(faults, "tensor {}: {} blocks", i, t.blocks);
    if (!aligned(t.x, 16)) fault(faults, "tensor {}: x misaligned or null", i);
    if (t.ld < t.cols || !is_row_stride(t.ld, t.cols, in) || t.cols % 8 != 0) {
      fault(faults, "tensor {}: ld {} cols {}", i, t.ld, t.cols);
    }
    next += t.blocks;
  }
  if (static_cast<int>(grid) != next) fault(faults, "grid {} for {} blocks", grid, next);
}

}  // namespace

namespace {

// The words of the whole's blocks, of which a shard has some rows.
void raise_blocks(const codegen::AmaxSpec& spec, const kernels::AmaxTensor& t) {
  const int across = (t.cols + kCastTile - 1) / kCastTile;
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols; ++c) {
      raise(t.block_amax[(t.shard.first + r) / kCastTile * across + c / kCastTile],
            magnitude(load_value(spec, t.x, r * t.ld + c)));
    }
  }
}

// Tells whether a launch has the words of a shard's blocks, and says if it has not.
template <class Tensor>
bool has_blocks(const Tensor& t, int index, Faults& faults) {
  const size_t before = faults.size();
  if (t.block_amax == nullptr) fault(faults, "tensor {}: no words of blocks", index);
  if (t.shard.first < 0 || t.shard.first + t.rows > t.shard.whole) {
    fault(faults, "tensor {}: {} rows from {} on of {}", index, t.rows, t.shard.first,
          t.shard.whole);
  }
  if (static_cast<unsigned>(t.blocks) != cast_tiles(t.rows, t.cols)) {
    fault(faults, "tensor {}: {} blocks for its tiles", index, t.blocks);
  }
  return faults.size() == before;
}

template <class Args>
void run_amax(const codegen::AmaxSpec& spec, const Args& args, unsigned grid, Faults& faults) {
  check_blocks(args, codegen::memory_type(spec), grid, faults);
  if (!faults.empty() || is_noop(spec.noop_flag, args.noop_flag)) return;
  const bool axes = spec.row || spec.col;
  for (int i = 0; i < args.count; ++i) {
    const kernels::AmaxTensor& t = args.tensors[i];
    if (spec.block) {
      if (!has_blocks(t, i, faults)) return;
      raise_blocks(spec, t);
      continue;
    }
    const int across = (t.cols + kCastTile - 1) / kCastTile;
    const auto tile_amax_of = [&](int64_t r, int64_t c) {
      return t.tile_amax + (r / kCastTile * across + c / kCastTile) * kernels::kTileAmaxSize;
    };
    if (t.tile_amax != nullptr) {
      if (!axes || spec.tensor || spec.in == Dtype::kF32) {
        return fault(faults, "tensor {}: per-tile amaxes of {}", i, codegen::key(spec));
      }
      if (!aligned(t.tile_amax, 8))
        return fault(faults, "tensor {}: per-tile amaxes misaligned", i);
      for (int tile = 0; tile < t.blocks; ++tile) {
        uint16_t* of_tile = t.tile_amax + tile * kernels::kTileAmaxSize;
        if (spec.row) std::fill_n(of_tile, kCastTile, uint16_t{0});
        if (spec.col) std::fill_n(of_tile + kCastTile, kCastTile, uint16_t{0});
      }
    } else if ((spec.row && t.row_amax == nullptr) || (spec.col && t.col_amax == nullptr)) {
      return fault(faults, "tensor {}: no amax buffer for its rows or columns", i);
    }
    if (spec.tensor && t.partials == nullptr) return fault(faults, "tensor {}: no partials", i);
    if (!axes) {
      std::fill_n(t.partials, t.blocks, 0U);
    } else if (static_cast<unsigned>(t.blocks) != cast_tiles(t.rows, t.cols)) {
      return fault(faults, "tensor {}: {} blocks for its tiles", i, t.blocks);
    }
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t c = 0; c < t.cols; ++c) {
        const int64_t at = r * t.ld + c;
        const uint32_t bits = magnitude(load_value(spec, t.x, at));
        if (spec.tensor) raise(t.partials[axes ? 0 : (r * t.cols + c) % t.blocks], bits);
        if (t.tile_amax != nullptr) {
          const uint16_t half = load_half(spec, t.x, at);
          if (spec.row) raise_amax(tile_amax_of(r, c)[r % kCastTile], half);
          if (spec.col) raise_amax(tile_amax_of(r, c)[kCastTile + c % kCastTile], half);
          continue;
        }
        if (spec.row) raise(t.row_amax[r], bits);
        if (spec.col) raise(t.col_amax[c], bits);
      }
    }
  }
}

Matrix read(const codegen::CastSpec& spec, const kernels::CastTensor& t) {
  Matrix x{t.rows, t.cols, {}};
  x.values.reserve(static_cast<size_t>(x.rows * x.cols));
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.cols; ++c) x.values.push_back(load_value(spec, t.x, r * t.ld + c));
  }
  return x;
}

AmaxOver amax_over(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kTensor:
      return AmaxOver::kTensor;
    case ScaleMode::kAxis:
      return AmaxOver::kRow;
    case ScaleMode::kBlock1x128:
      return AmaxOver::kBlock1x128;
    case ScaleMode::kBlock128x128:
      return AmaxOver::kBlock128x128;
  }
  return AmaxOver::kTensor;
}

NonFinite non_finite(const codegen::CastSpec& spec) {
  return spec.saturate ? NonFinite::kSaturate : NonFinite::kPropagate;
}

float to_scale(const codegen::CastSpec& spec, float amax) {
  return scale_from_amax(amax, spec.out, spec.pow2, non_finite(spec));
}

// One copy, whose rows are the rows of x or, transposed, its columns.
struct Copy {
  const kernels::CastTensor& t;
  const codegen::CastSpec& spec;
  ScaleMode mode;
  bool transposed;

  [[nodiscard]] const char* name() const { return transposed ? "qt" : "q"; }

  [[nodiscard]] float scale_of(float amax) const { return to_scale(spec, amax); }

  // Gives the amax of a row of the copy, from what the amax kernel left.
  [[nodiscard]] float known(int64_t index, int64_t extent) const {
    const auto before = amax_before(spec);
    if (before->tensor || t.tile_amax == nullptr) {
      return std::bit_cast<float>((transposed ? t.col_amax : t.row_amax)[index]);
    }
    const int64_t across = (t.cols + kCastTile - 1) / kCastTile;
    const int64_t peers = (extent + kCastTile - 1) / kCastTile;
    uint16_t most = 0;
    for (int64_t peer = 0; peer < peers; ++peer) {
      const int64_t tile =
          transposed ? peer * across + index / kCastTile : index / kCastTile * across + peer;
      most = std::max(most, t.tile_amax[tile * kernels::kTileAmaxSize +
                                        (transposed ? kCastTile : 0) + index % kCastTile]);
    }
    return load_element(&most, 0, spec.in);
  }

  // `x` has the copy's own rows and columns.
  [[nodiscard]] std::vector<float> scales(const Matrix& x, float tensor_scale) const {
    if (mode == ScaleMode::kTensor) return {tensor_scale};
    std::vector<float> values;
    if (mode == ScaleMode::kAxis) {
      for (int64_t index = 0; index < x.rows; ++index) values.push_back(known(index, x.cols));
    } else {
      values = reference::amax(x, amax_over(mode));
    }
    for (float& value : values) value = scale_of(value);
    return values;
  }

  void write_inverses(const reference::Fp8Matrix& copy) const {
    float* to = transposed ? t.inv_scale_col : t.inv_scale_row;
    if (mode == ScaleMode::kTensor) return;
    if (mode == ScaleMode::kAxis) {
      std::ranges::copy(copy.inv_scales, to);
      return;
    }
    // The reference has [rows][blocks]; here rows of scales are padded with zeros.
    const auto blocks = static_cast<size_t>((copy.cols + kCastTile - 1) / kCastTile);
    const size_t axes = copy.inv_scales.size() / blocks;
    const bool by_block = mode == ScaleMode::kBlock1x128;
    const auto stride =
        static_cast<size_t>(kernels::padded_scales(static_cast<int64_t>(by_block ? axes : blocks)));
    std::fill_n(to, stride * (by_block ? blocks : axes), 0.0F);
    for (size_t i = 0; i < copy.inv_scales.size(); ++i) {
      const size_t index = i / blocks;
      const size_t block = i % blocks;
      to[by_block ? block * stride + index : index * stride + block] = copy.inv_scales[i];
    }
  }

  // `copy` is x's.
  void add_to(kernels::CastCounters& counters, const Matrix& x,
              const reference::Fp8Matrix& copy) const {
    raise(counters.amax, magnitude(reference::amax(x, AmaxOver::kTensor)[0]));
    if (mode == ScaleMode::kTensor) counters.scale = copy.scales[0];
    counters.elements += x.values.size();
    const reference::CastCounts counts = reference::count_cast(x, copy);
    counters.saturated += counts.saturated;
    counters.flushed += counts.flushed;
    counters.non_finite += counts.non_finite;
  }

  void write(const Matrix& x, float tensor_scale, kernels::CastCounters* counters,
             Faults& faults) const {
    uint8_t* out = transposed ? t.qt : t.q;
    const int64_t ld = transposed ? t.ld_qt : t.ld_q;
    const float* inverses = transposed ? t.inv_scale_col : t.inv_scale_row;
    if (!aligned(out, 16) || ld < x.cols || ld % 16 != 0) {
      return fault(faults, "{}: null, misaligned or rows {} apart", name(), ld);
    }
    if (mode != ScaleMode::kTensor && !aligned(inverses, is_block(mode) ? 16 : 4)) {
      return fault(faults, "{}: inverse scales null or misaligned", name());
    }
    const auto copy =
        mode == ScaleMode::kTensor && spec.delayed
            ? reference::cast_delayed(x, spec.out, tensor_scale, non_finite(spec))
            : reference::cast_with_scales(x, amax_over(mode), spec.out, scales(x, tensor_scale));
    for (int64_t index = 0; index < x.rows; ++index) {
      uint8_t* to = out + index * ld;
      std::copy_n(copy.bits.begin() + index * x.cols, x.cols, to);
      if (transposed) std::fill(to + x.cols, to + ld, uint8_t{0});
    }
    write_inverses(copy);
    if (counters != nullptr) add_to(*counters, x, copy);
  }

  // Writes the copy of a shard, with the inverse scales of the whole; `x` is as it lies.
  void write_shard(const Matrix& x, kernels::CastCounters* counters, Faults& faults) const {
    const int64_t ld = transposed ? t.ld_qt : t.ld_q;
    float* inverses = transposed ? t.inv_scale_col : t.inv_scale_row;
    uint8_t* out = transposed ? t.qt : t.q;
    if (!aligned(out, 16) || ld < (transposed ? x.rows : x.cols) || ld % 16 != 0 ||
        !aligned(inverses, 16)) {
      return fault(faults, "{} of a shard: null, misaligned or rows {} apart", name(), ld);
    }
    const int64_t down = ceil_div(t.shard.whole, kCastTile);
    const int64_t across = ceil_div(x.cols, kCastTile);
    std::vector<float> amax;
    for (int64_t i = 0; i < down * across; ++i) {
      amax.push_back(std::bit_cast<float>(t.block_amax[i]));
    }
    const auto copy =
        reference::cast_shard(x, t.shard.first, spec.out, spec.pow2, amax, non_finite(spec));
    for (int64_t r = 0; r < (transposed ? ld : x.rows); ++r) {
      for (int64_t c = 0; c < x.cols; ++c) {
        const uint8_t bits = r < x.rows ? copy.bits[static_cast<size_t>(r * x.cols + c)] : 0;
        out[transposed ? c * ld + r : r * ld + c] = bits;
      }
    }
    const int64_t stride = kernels::padded_scales(transposed ? down : across);
    std::fill_n(inverses, stride * (transposed ? across : down), 0.0F);
    for (int64_t row = 0; row < down; ++row) {
      for (int64_t column = 0; column < across; ++column) {
        inverses[transposed ? column * stride + row : row * stride + column] =
            copy.inv_scales[static_cast<size_t>(row * across + column)];
      }
    }
    if (counters != nullptr) add_to(*counters, x, copy);
  }
};

template <class Args>
void run_cast(const codegen::CastSpec& spec, const Args& args, unsigned grid, Faults& faults) {
  check_blocks(args, codegen::memory_type(spec), grid, faults);
  if (!faults.empty() || is_noop(spec.noop_flag, args.noop_flag)) return;
  for (int i = 0; i < args.count; ++i) {
    const kernels::CastTensor& t = args.tensors[i];
    if (static_cast<unsigned>(t.blocks) != cast_tiles(t.rows, t.cols)) {
      return fault(faults, "tensor {}: {} blocks for its tiles", i, t.blocks);
    }
    const Matrix x = read(spec, t);
    float tensor_scale = 0;
    if (codegen::has_scale(spec, ScaleMode::kTensor)) {
      uint32_t amax = 0;
      if (t.scale == nullptr) return fault(faults, "tensor {}: no place for its scale", i);
      if (spec.delayed) {
        if (t.delayed == nullptr) return fault(faults, "tensor {}: no delayed scale", i);
        tensor_scale = *t.delayed;
        amax = magnitude(reference::amax(x, AmaxOver::kTensor)[0]);
      } else if (t.partial_count < 1 || t.partials == nullptr) {
        return fault(faults, "tensor {}: no partials", i);
      } else {
        amax = *std::max_element(t.partials, t.partials + t.partial_count);
        tensor_scale = to_scale(spec, std::bit_cast<float>(amax));
      }
      if (t.amax != nullptr) raise(*t.amax, amax);
      t.scale[0] = tensor_scale;
      t.scale[kernels::kInverse] = inverse_scale(tensor_scale);
    }
    kernels::CastCounters* counters = spec.count ? args.counters[i] : nullptr;
    kernels::CastCounters* of_qt = counters == nullptr ? nullptr : counters + 1;
    if (spec.sums && args.sums != nullptr) sum_columns(x, args.sums);
    if (spec.shard) {
      if (!has_blocks(t, i, faults)) return;
      if (spec.q) Copy{t, spec, spec.scale_q, false}.write_shard(x, counters, faults);
      if (spec.qt) Copy{t, spec, spec.scale_qt, true}.write_shard(x, of_qt, faults);
      continue;
    }
    if (spec.q) Copy{t, spec, spec.scale_q, false}.write(x, tensor_scale, counters, faults);
    if (spec.qt)
      Copy{t, spec, spec.scale_qt, true}.write(transpose(x), tensor_scale, of_qt, faults);
  }
}

// Takes the amaxes and casts; the blocks must fit a device of `sm_count` SMs at once.
void run_quantize(const codegen::CastSpec& spec, const kernels::QuantizeArgs& args, unsigned grid,
                  int sm_count, Faults& faults) {
  const kernels::CastTensor& last = args.cast.tensors[args.cast.count - 1];
  const int blocks = last.first_block + last.blocks;
  const bool rows_alone = codegen::scales_rows_alone(spec);
  const int resident = codegen::kQuantizeBlocksPerSm * sm_count;
  int64_t pairs = 0;
  for (int i = 0; i < args.cast.count; ++i) {
    const kernels::CastTensor& t = args.cast.tensors[i];
    pairs += kernels::pairs_of_tiles((t.cols + kCastTile - 1) / kCastTile,
                                     (t.rows + kCastTile - 1) / kCastTile);
  }
  if (grid != (rows_alone || blocks <= resident ? blocks : pairs) ||
      (!rows_alone && pairs > resident)) {
    fault(faults, "{} blocks of a one-launch cast of {} on {} SMs", grid, blocks, sm_count);
  }
  if (!aligned(args.sync, 16)) return fault(faults, "sync misaligned or null");
  ++args.sync[0];
  kernels::CastArgs cast = args.cast;
  check_blocks(cast, spec.in, static_cast<unsigned>(blocks), faults);
  int tiles_of_all = 0;
  for (int i = 0; i < cast.count; ++i) {
    kernels::CastTensor& t = cast.tensors[i];
    if (rows_alone && t.blocks != kernels::blocks_of_rows(t.rows, t.cols)) {
      fault(faults, "tensor {}: {} blocks for {} rows", i, t.blocks, t.rows);
    }
    if (rows_alone) t.blocks = static_cast<int>(cast_tiles(t.rows, t.cols));
    t.first_block = tiles_of_all;
    tiles_of_all += t.blocks;
  }
  if (!faults.empty()) return;
  const auto before = amax_before(spec);
  std::vector<std::vector<uint32_t>> maxima;
  for (int i = 0; i < cast.count; ++i) {
    kernels::CastTensor& t = cast.tensors[i];
    auto& words = maxima.emplace_back(static_cast<size_t>(1 + t.rows + t.cols), 0U);
    uint32_t* rows = words.data() + 1;
    uint32_t* cols = rows + t.rows;
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t c = 0; c < t.cols; ++c) {
        const uint32_t bits = magnitude(load_element(t.x, r * t.ld + c, spec.in));
        for (uint32_t* word : {words.data(), rows + r, cols + c}) raise(*word, bits);
      }
    }
    if (before && before->tensor) {
      t.partials = words.data();
    } else {
      t.tile_amax = nullptr;
    }
    t.partial_count = 1;
    t.row_amax = rows;
    t.col_amax = cols;
  }
  run_cast(spec, cast, static_cast<unsigned>(tiles_of_all), faults);
}

void run_one_launch(const codegen::CastSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::QuantizeArgs>();
  if (args.sync == nullptr) return call.fault("sync is null");
  const ReservedBytes reserved = reserved_bytes(args, call.sm_count);
  if (!are_untouched(reserved)) {
    return call.fault(
        "somebody wrote to the first {} bytes of the workspace since its last call; they belong "
        "to float8 (float8_workspace_reserved_bytes): write behind them, or set all of them to 0 "
        "before the next call",
        reserved.count);
  }
  run_quantize(spec, args, call.launch.grid, call.sm_count, call.faults);
  remember(reserved, &call.module);
}

}  // namespace

void emulate(const codegen::AmaxSpec& spec, const Call& call) {
  if (spec.group) return emulate_groups(spec, call);
  const unsigned grid = call.launch.grid;
  if (spec.list) return run_amax(spec, call.args<kernels::AmaxListArgs>(), grid, call.faults);
  run_amax(spec, call.args<kernels::AmaxArgs>(), grid, call.faults);
}

void emulate(const codegen::CastSpec& spec, const Call& call) {
  if (spec.group) return emulate_groups(spec, call);
  const unsigned grid = call.launch.grid;
  if (codegen::is_cooperative(spec) != call.launch.cooperative) {
    call.fault("a one-launch cast of tiles is cooperative, others are not");
  }
  if (spec.one_launch) return run_one_launch(spec, call);
  if (spec.list) return run_cast(spec, call.args<kernels::CastListArgs>(), grid, call.faults);
  run_cast(spec, call.args<kernels::CastArgs>(), grid, call.faults);
}

}  // namespace f8::runtime::emulation
