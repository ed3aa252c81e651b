#include "tests/unit/runtime/emulate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "recipes/dtype.hpp"
#include "recipes/scale.hpp"
#include "runtime/quantize.hpp"

namespace f8::runtime::testing {
namespace {

using kernels::kCastTile;

template <class... Args>
void fault(std::vector<std::string>& faults, fmt::format_string<Args...> format, Args&&... args) {
  faults.push_back(fmt::format(format, std::forward<Args>(args)...));
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

// A magnitude of a 16-bit type.
void raise_line(uint16_t& line, uint32_t bits, Dtype type) {
  const auto value = std::bit_cast<float>(bits);
  line =
      std::max(line, type == Dtype::kF16 ? encode_f16(value) : static_cast<uint16_t>(bits >> 16));
}

unsigned tiles(int rows, int cols) {
  return static_cast<unsigned>((rows + kCastTile - 1) / kCastTile) *
         static_cast<unsigned>((cols + kCastTile - 1) / kCastTile);
}

template <class Args>
void check_blocks(const Args& args, unsigned grid, std::vector<std::string>& faults) {
  int next = 0;
  for (int i = 0; i < args.count; ++i) {
    const auto& t = args.tensors[i];
    if (t.first_block != next) fault(faults, "tensor {}: first block {}", i, t.first_block);
    if (t.blocks < 1) fault(faults, "tensor {}: {} blocks", i, t.blocks);
    if (!aligned(t.x, 16)) fault(faults, "tensor {}: x misaligned or null", i);
    if (t.ld < t.cols || t.cols % 8 != 0)
      fault(faults, "tensor {}: ld {} cols {}", i, t.ld, t.cols);
    next += t.blocks;
  }
  if (static_cast<int>(grid) != next) fault(faults, "grid {} for {} blocks", grid, next);
}

}  // namespace

template <class Args>
void emulate_amax(const codegen::AmaxSpec& spec, const Args& args, unsigned grid,
                  std::vector<std::string>& faults) {
  check_blocks(args, grid, faults);
  const bool lines = spec.row || spec.col;
  for (int i = 0; i < args.count; ++i) {
    const kernels::AmaxTensor& t = args.tensors[i];
    const int across = (t.cols + kCastTile - 1) / kCastTile;
    const auto lines_at = [&](int64_t r, int64_t c) {
      return t.lines + (r / kCastTile * across + c / kCastTile) * kernels::kLinesOfTile;
    };
    if (t.lines != nullptr) {
      if (!lines || spec.tensor) fault(faults, "tensor {}: lines of {}", i, codegen::key(spec));
      if (!aligned(t.lines, 8)) fault(faults, "tensor {}: lines misaligned", i);
      for (int tile = 0; tile < t.blocks; ++tile) {
        uint16_t* of_tile = t.lines + tile * kernels::kLinesOfTile;
        if (spec.row) std::fill_n(of_tile, kCastTile, uint16_t{0});
        if (spec.col) std::fill_n(of_tile + kCastTile, kCastTile, uint16_t{0});
      }
    }
    if (!lines) {
      std::fill_n(t.partials, t.blocks, 0U);
    } else if (static_cast<unsigned>(t.blocks) != tiles(t.rows, t.cols)) {
      fault(faults, "tensor {}: {} blocks for its tiles", i, t.blocks);
    }
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t c = 0; c < t.cols; ++c) {
        const uint32_t bits = magnitude(load_element(t.x, r * t.ld + c, spec.in));
        if (spec.tensor) raise(t.partials[lines ? 0 : (r * t.cols + c) % t.blocks], bits);
        if (t.lines != nullptr) {
          if (spec.row) raise_line(lines_at(r, c)[r % kCastTile], bits, spec.in);
          if (spec.col) raise_line(lines_at(r, c)[kCastTile + c % kCastTile], bits, spec.in);
          continue;
        }
        if (spec.row) raise(t.row_amax[r], bits);
        if (spec.col) raise(t.col_amax[c], bits);
      }
    }
  }
}

namespace {

// One copy: its lines are rows of x, or columns.
struct Copy {
  const kernels::CastTensor& t;
  const codegen::CastSpec& spec;
  codegen::ScaleMode mode;
  bool transposed;

  [[nodiscard]] int64_t lines() const { return transposed ? t.cols : t.rows; }
  [[nodiscard]] int64_t extent() const { return transposed ? t.rows : t.cols; }
  [[nodiscard]] float x(int64_t line, int64_t at) const {
    return load_element(t.x, transposed ? at * t.ld + line : line * t.ld + at, spec.in);
  }
  [[nodiscard]] float scale_of(uint32_t bits) const {
    return scale_from_amax(std::bit_cast<float>(bits), spec.out, spec.pow2);
  }
  // Of elements [line, line_end) x [at, at_end) cut at the edges.
  [[nodiscard]] uint32_t amax(int64_t line, int64_t line_end, int64_t at, int64_t at_end) const {
    uint32_t most = 0;
    for (int64_t l = line; l < std::min(line_end, lines()); ++l) {
      for (int64_t a = at; a < std::min(at_end, extent()); ++a) raise(most, magnitude(x(l, a)));
    }
    return most;
  }

  // The amax of a line, from what the amax kernel left.
  [[nodiscard]] uint32_t known(int64_t line) const {
    const auto before = amax_before(spec);
    if (before->tensor || t.lines == nullptr) return (transposed ? t.col_amax : t.row_amax)[line];
    const int64_t across = (t.cols + kCastTile - 1) / kCastTile;
    const int64_t peers = (extent() + kCastTile - 1) / kCastTile;
    uint32_t most = 0;
    for (int64_t peer = 0; peer < peers; ++peer) {
      const int64_t tile =
          transposed ? peer * across + line / kCastTile : line / kCastTile * across + peer;
      raise(
          most,
          t.lines[tile * kernels::kLinesOfTile + (transposed ? kCastTile : 0) + line % kCastTile]);
    }
    const auto bits = static_cast<uint16_t>(most);
    return std::bit_cast<uint32_t>(spec.in == Dtype::kF16 ? decode_f16(bits) : decode_bf16(bits));
  }

  void write(float tensor_scale, std::vector<std::string>& faults) const {
    constexpr int64_t kBlock = kCastTile;
    uint8_t* out = transposed ? t.qt : t.q;
    const int64_t ld = transposed ? t.ld_qt : t.ld_q;
    float* inverses = transposed ? t.inv_scale_col : t.inv_scale_row;
    if (!aligned(out, 16) || ld < extent() || ld % 16 != 0) {
      fault(faults, "{}: null, misaligned or rows {} apart", transposed ? "qt" : "q", ld);
      return;
    }
    const bool block = codegen::is_block(mode);
    if (block && !aligned(inverses, 16)) fault(faults, "block scales null or misaligned");
    const int64_t blocks = (extent() + kBlock - 1) / kBlock;
    for (int64_t line = 0; line < lines(); ++line) {
      float scale = tensor_scale;
      if (mode == codegen::ScaleMode::kAxis) {
        scale = scale_of(known(line));
        inverses[line] = inverse_scale(scale);
      }
      for (int64_t b = 0; b < blocks; ++b) {
        if (mode == codegen::ScaleMode::kBlock1x128) {
          scale = scale_of(amax(line, line + 1, b * kBlock, (b + 1) * kBlock));
          const int64_t stride = kernels::padded_scales(lines());
          inverses[b * stride + line] = inverse_scale(scale);
          if (line + 1 == lines())
            std::fill(inverses + b * stride + lines(), inverses + (b + 1) * stride, 0.0F);
        } else if (mode == codegen::ScaleMode::kBlock128x128) {
          const int64_t first = line / kBlock * kBlock;
          scale = scale_of(amax(first, first + kBlock, b * kBlock, (b + 1) * kBlock));
          const int64_t stride = kernels::padded_scales(blocks);
          inverses[line / kBlock * stride + b] = inverse_scale(scale);
          std::fill(inverses + line / kBlock * stride + blocks,
                    inverses + (line / kBlock + 1) * stride, 0.0F);
        }
        const int64_t end = std::min((b + 1) * kBlock, extent());
        for (int64_t at = b * kBlock; at < end; ++at) {
          out[line * ld + at] = cast_to_fp8(x(line, at), scale, spec.out);
        }
      }
      if (transposed) std::fill(out + line * ld + extent(), out + (line + 1) * ld, uint8_t{0});
    }
  }
};

}  // namespace

template <class Args>
void emulate_cast(const codegen::CastSpec& spec, const Args& args, unsigned grid,
                  std::vector<std::string>& faults) {
  check_blocks(args, grid, faults);
  for (int i = 0; i < args.count; ++i) {
    const kernels::CastTensor& t = args.tensors[i];
    if (static_cast<unsigned>(t.blocks) != tiles(t.rows, t.cols)) {
      fault(faults, "tensor {}: {} blocks for its tiles", i, t.blocks);
    }
    const Copy q{t, spec, spec.scale_q, false};
    const Copy qt{t, spec, spec.scale_qt, true};
    float tensor_scale = 0;
    if (codegen::has_scale(spec, codegen::ScaleMode::kTensor)) {
      uint32_t amax = 0;
      if (spec.delayed) {
        tensor_scale = *t.delayed;
        amax = q.amax(0, t.rows, 0, t.cols);
      } else if (t.partial_count < 1) {
        fault(faults, "tensor {}: no partials", i);
        continue;
      } else {
        amax = *std::max_element(t.partials, t.partials + t.partial_count);
        tensor_scale = q.scale_of(amax);
      }
      if (t.amax != nullptr) raise(*t.amax, amax);
      t.scale[0] = tensor_scale;
      t.scale[kernels::kInverse] = inverse_scale(tensor_scale);
    }
    if (spec.q) q.write(tensor_scale, faults);
    if (spec.qt) qt.write(tensor_scale, faults);
  }
}

template void emulate_amax(const codegen::AmaxSpec&, const kernels::AmaxArgs&, unsigned,
                           std::vector<std::string>&);
template void emulate_amax(const codegen::AmaxSpec&, const kernels::AmaxListArgs&, unsigned,
                           std::vector<std::string>&);
template void emulate_cast(const codegen::CastSpec&, const kernels::CastArgs&, unsigned,
                           std::vector<std::string>&);
template void emulate_cast(const codegen::CastSpec&, const kernels::CastListArgs&, unsigned,
                           std::vector<std::string>&);

void emulate_quantize(const codegen::CastSpec& spec, const kernels::QuantizeArgs& args,
                      unsigned grid, int sm_count, std::vector<std::string>& faults) {
  if (static_cast<int>(grid) > codegen::kQuantizeBlocksPerSm * sm_count) {
    fault(faults, "{} blocks of a cooperative launch on {} SMs", grid, sm_count);
  }
  if (!aligned(args.sync, 16)) return fault(faults, "sync misaligned or null");
  ++args.sync[0];
  kernels::CastArgs cast = args.cast;
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
    const auto before = amax_before(spec);
    if (before && before->tensor) {
      t.partials = words.data();
    } else {
      t.lines = nullptr;
    }
    t.partial_count = 1;
    t.row_amax = rows;
    t.col_amax = cols;
  }
  emulate_cast(spec, cast, grid, faults);
}

void emulate_scale_update(const kernels::ScaleUpdateArgs& args, unsigned grid,
                          std::vector<std::string>& faults) {
  if (static_cast<int>(grid) != (args.count + 255) / 256)
    fault(faults, "scale update: grid {}", grid);
  for (int i = 0; i < args.count; ++i) {
    // Written after the kernel, not after the reference that the test compares it to.
    const uint32_t amax = args.amax[i];
    args.amax[i] = 0;
    if (amax >= 0x7f800000U) {
      ++args.non_finite[i];
      if (args.hold != 0) continue;
    }
    uint32_t most = amax;
    for (int age = args.length - 1; age > 0; --age) {
      args.history[age * args.count + i] = args.history[(age - 1) * args.count + i];
      raise(most, args.history[age * args.count + i]);
    }
    args.history[i] = amax;
    if (args.most_recent != 0) most = amax;
    if (most == 0) continue;
    const uint32_t format = args.format[i];
    float scale =
        scale_from_amax(std::bit_cast<float>(most),
                        (format & kernels::kFormatE5m2) != 0 ? Dtype::kE5m2 : Dtype::kE4m3, false) *
        args.margin_factor;
    if ((format & kernels::kFormatPow2) != 0) scale = power_of_two(scale);
    args.scale[i * kernels::kScaleStride] = scale;
    args.scale[i * kernels::kScaleStride + kernels::kInverse] = inverse_scale(scale);
  }
}

namespace {

// Where the inverse scale of line i of an operand and block j of the contraction lies.
int64_t scale_at(codegen::ScaleMode mode, uint32_t stride, int64_t i, int64_t j) {
  switch (mode) {
    case codegen::ScaleMode::kTensor:
      return 0;
    case codegen::ScaleMode::kAxis:
      return i * stride;
    case codegen::ScaleMode::kBlock1x128:
      return j * stride + i;
    case codegen::ScaleMode::kBlock128x128:
      return i / 128 * stride + j;
  }
  return 0;
}

}  // namespace

void emulate_gemm(const codegen::GemmSpec& spec, const FakeTensorMap& a, const FakeTensorMap& b,
                  const FakeTensorMap& d, const kernels::GemmProblem& args,
                  std::vector<std::string>& faults) {
  const codegen::GemmConfig& config = spec.config;
  const auto d_bytes = static_cast<unsigned>(size_bytes(spec.d));
  if (d.f16 != (spec.d == Dtype::kF16)) fault(faults, "d: its map's type");
  const auto check = [&](const char* name, const FakeTensorMap& map, unsigned cols, unsigned rows,
                         unsigned element_bytes, int box_rows) {
    if (map.cols != cols || map.rows != rows) {
      fault(faults, "{}: map is {} x {}, expected {} x {}", name, map.rows, map.cols, rows, cols);
    }
    if (map.element_bytes != element_bytes) fault(faults, "{}: element type", name);
    if (map.ld_bytes % 16 != 0 || map.ld_bytes < cols * element_bytes) {
      fault(faults, "{}: rows {} bytes apart", name, map.ld_bytes);
    }
    if (map.box_cols * element_bytes != 128 || static_cast<int>(map.box_rows) != box_rows ||
        map.box_rows > 256) {
      fault(faults, "{}: box {} x {}", name, map.box_rows, map.box_cols);
    }
    if (!aligned(map.base, 16)) fault(faults, "{}: misaligned or null", name);
  };
  check("a", a, args.k, args.m, 1, config.tile_m / config.cluster_n);
  check("b", b, args.k, args.n, 1, config.tile_n / config.cluster_m);
  check("d", d, args.n, args.m, d_bytes, 64);
  if (!faults.empty()) return;

  const bool block = codegen::is_block(spec.scale);
  const auto mode_a = block ? codegen::ScaleMode::kBlock1x128 : spec.scale;
  if (block && (args.stride_a % 4 != 0 || args.stride_b % 4 != 0 ||
                !aligned(args.inv_scale_a, 16) || !aligned(args.inv_scale_b, 16))) {
    fault(faults, "block scales: strides {} and {}", args.stride_a, args.stride_b);
    return;
  }
  const auto* bytes_a = static_cast<const uint8_t*>(a.base);
  const auto* bytes_b = static_cast<const uint8_t*>(b.base);
  auto* bytes_d = static_cast<uint8_t*>(d.base);
  for (uint32_t i = 0; i < args.m; ++i) {
    for (uint32_t j = 0; j < args.n; ++j) {
      double sum = 0;
      for (uint32_t k0 = 0; k0 < args.k; k0 += 128) {
        double part = 0;
        for (uint32_t k = k0; k < std::min(k0 + 128, args.k); ++k) {
          part += static_cast<double>(decode_fp8(bytes_a[i * a.ld_bytes + k], spec.a)) *
                  static_cast<double>(decode_fp8(bytes_b[j * b.ld_bytes + k], spec.b));
        }
        if (block) {
          part *= static_cast<double>(
              args.inv_scale_a[scale_at(mode_a, args.stride_a, i, k0 / 128)] *
              args.inv_scale_b[scale_at(spec.scale, args.stride_b, j, k0 / 128)]);
        }
        sum += part;
      }
      auto result = static_cast<float>(sum);
      if (!block) {
        result *= args.inv_scale_a[scale_at(spec.scale, args.stride_a, i, 0)] *
                  args.inv_scale_b[scale_at(spec.scale, args.stride_b, j, 0)];
      }
      if (spec.bias) result += load_element(args.bias, j, spec.d);
      if (spec.amax) raise(*args.amax, magnitude(result));
      uint8_t* row = bytes_d + i * d.ld_bytes;
      const float before = load_element(row, j, spec.d);
      store_element(row, j, result, spec.d);
      if (spec.add) store_element(row, j, load_element(row, j, spec.d) + before, spec.d);
    }
  }
}

}  // namespace f8::runtime::testing
