#include "tests/unit/runtime/emulate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "recipes/dtype.hpp"
#include "recipes/scale.hpp"

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

float load(const void* x, int64_t i) {
  return decode_bf16(static_cast<const uint16_t*>(x)[i]);
}

uint32_t magnitude(float v) {
  return std::bit_cast<uint32_t>(v) & 0x7fffffffU;
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

void emulate_amax(const codegen::AmaxSpec& spec, const kernels::AmaxArgs& args, unsigned grid,
                  std::vector<std::string>& faults) {
  check_blocks(args, grid, faults);
  for (int i = 0; i < args.count; ++i) {
    const kernels::AmaxTensor& t = args.tensors[i];
    if (spec.tensor) {
      std::fill_n(t.partials, t.blocks, 0U);
    } else if (static_cast<unsigned>(t.blocks) != tiles(t.rows, t.cols)) {
      fault(faults, "tensor {}: {} blocks for its tiles", i, t.blocks);
    }
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t c = 0; c < t.cols; ++c) {
        const uint32_t bits = magnitude(load(t.x, r * t.ld + c));
        if (spec.tensor) {
          uint32_t& word = t.partials[(r * t.cols + c) % t.blocks];
          word = std::max(word, bits);
        }
        if (spec.row) t.row_amax[r] = std::max(t.row_amax[r], bits);
        if (spec.col) t.col_amax[c] = std::max(t.col_amax[c], bits);
      }
    }
  }
}

void emulate_cast(const codegen::CastSpec& spec, const kernels::CastArgs& args, unsigned grid,
                  std::vector<std::string>& faults) {
  check_blocks(args, grid, faults);
  const auto scale_of = [&](uint32_t bits) {
    return scale_from_amax(std::bit_cast<float>(bits), spec.out, spec.pow2);
  };
  for (int i = 0; i < args.count; ++i) {
    const kernels::CastTensor& t = args.tensors[i];
    const bool axis = spec.scale == codegen::ScaleMode::kAxis;
    if (static_cast<unsigned>(t.blocks) != tiles(t.rows, t.cols)) {
      fault(faults, "tensor {}: {} blocks for its tiles", i, t.blocks);
    }
    if (spec.q && (!aligned(t.q, 16) || t.ld_q < t.cols)) fault(faults, "tensor {}: q", i);
    if (spec.qt && (!aligned(t.qt, 16) || t.ld_qt < t.rows || t.ld_qt % 16 != 0)) {
      fault(faults, "tensor {}: qt", i);
    }
    float tensor_scale = 0;
    if (!axis) {
      if (t.partial_count < 1) fault(faults, "tensor {}: no partials", i);
      tensor_scale = scale_of(*std::max_element(t.partials, t.partials + t.partial_count));
      t.scale[0] = tensor_scale;
      t.scale[kernels::kInverse] = inverse_scale(tensor_scale);
    }
    if (spec.q) {
      for (int64_t r = 0; r < t.rows; ++r) {
        const float scale = axis ? scale_of(t.row_amax[r]) : tensor_scale;
        if (axis) t.inv_scale_row[r] = inverse_scale(scale);
        for (int64_t c = 0; c < t.cols; ++c) {
          t.q[r * t.ld_q + c] = cast_to_fp8(load(t.x, r * t.ld + c), scale, spec.out);
        }
      }
    }
    if (spec.qt) {
      for (int64_t c = 0; c < t.cols; ++c) {
        const float scale = axis ? scale_of(t.col_amax[c]) : tensor_scale;
        if (axis) t.inv_scale_col[c] = inverse_scale(scale);
        for (int64_t r = 0; r < t.ld_qt; ++r) {
          t.qt[c * t.ld_qt + r] =
              r < t.rows ? cast_to_fp8(load(t.x, r * t.ld + c), scale, spec.out) : uint8_t{0};
        }
      }
    }
  }
}

void emulate_gemm(const codegen::GemmSpec& spec, const FakeTensorMap& a, const FakeTensorMap& b,
                  const FakeTensorMap& d, const kernels::GemmArgs& args,
                  std::vector<std::string>& faults) {
  const codegen::GemmConfig& config = spec.config;
  const unsigned d_bytes = spec.d == Dtype::kF32 ? 4 : 2;
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

  const bool axis = spec.scale == codegen::ScaleMode::kAxis;
  const auto* bytes_a = static_cast<const uint8_t*>(a.base);
  const auto* bytes_b = static_cast<const uint8_t*>(b.base);
  auto* bytes_d = static_cast<uint8_t*>(d.base);
  for (uint32_t i = 0; i < args.m; ++i) {
    for (uint32_t j = 0; j < args.n; ++j) {
      double sum = 0;
      for (uint32_t k = 0; k < args.k; ++k) {
        sum += static_cast<double>(decode_fp8(bytes_a[i * a.ld_bytes + k], spec.a)) *
               static_cast<double>(decode_fp8(bytes_b[j * b.ld_bytes + k], spec.b));
      }
      const float result =
          static_cast<float>(sum) * args.inv_scale_a[axis ? i : 0] * args.inv_scale_b[axis ? j : 0];
      uint8_t* to = bytes_d + i * d.ld_bytes + j * d_bytes;
      if (d_bytes == 4) {
        std::memcpy(to, &result, sizeof result);
      } else {
        const uint16_t rounded = encode_bf16(result);
        std::memcpy(to, &rounded, sizeof rounded);
      }
    }
  }
}

}  // namespace f8::runtime::testing
