// What a kernel is: enough to emit it, and nothing that varies from call to call. Shapes, pointers
// and scales are run-time arguments, so layers and token counts share kernels.
//
// A spec has a text form, its key, which names it in golden files and in `emit --kernel`:
//   amax  := "amax/" in "/" over                      over   := "tensor" | "row" | "col" | "rowcol"
//   cast  := "cast/" in "." out "/" scale "/" copies ["/pow2"]
//            scale := "tensor" | "axis"     copies := "q" | "qt" | "q+qt"
//   gemm  := "gemm/" a "." b "." d "/" scale "/" accum "/" tile
//            scale := "tensor" | "axis"     accum  := "fast" | "precise"
//            tile := tile_m "x" tile_n "s" stages "c" cluster_m "x" cluster_n "w" warpgroups ["p"]
// A GEMM's configuration, as the database and `--config` have it, adds what the launch alone needs:
//   config := tile "g" group
// Examples: gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w2 and 128x256s4c2x1w2g8
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.hpp"
#include "recipes/dtype.hpp"

namespace f8::codegen {

enum class ScaleMode : uint8_t { kTensor, kAxis };
[[nodiscard]] std::string_view to_string(ScaleMode mode);

struct AmaxSpec {
  Dtype in = Dtype::kBf16;
  bool tensor = true;  // else row, col or both
  bool row = false;
  bool col = false;
  bool operator==(const AmaxSpec&) const = default;
};

struct CastSpec {
  Dtype in = Dtype::kBf16;
  Dtype out = Dtype::kE4m3;
  ScaleMode scale = ScaleMode::kTensor;  // kAxis: q by rows, qt by columns
  bool q = true;                         // write the row-major copy
  bool qt = true;                        // write the transposed copy
  bool pow2 = false;
  bool operator==(const CastSpec&) const = default;
};

struct GemmConfig {
  int tile_m = 128;
  int tile_n = 256;
  int stages = 4;     // of (tile_m + tile_n) x 128 bytes
  int cluster_m = 2;  // CTAs of a cluster along m share the b tile by multicast, along n the a tile
  int cluster_n = 1;
  int warpgroups = 2;     // math warpgroups; one more warpgroup issues the copies
  bool pingpong = false;  // each math warpgroup works on its own tile, else they share one
  int group = 8;          // tiles of m that rasterisation keeps together; an argument of the launch
  bool operator==(const GemmConfig&) const = default;
};

struct GemmSpec {
  Dtype a = Dtype::kE4m3;
  Dtype b = Dtype::kE4m3;
  Dtype d = Dtype::kBf16;  // bf16 or f32
  ScaleMode scale = ScaleMode::kTensor;
  bool fast = true;
  GemmConfig config = {};
  bool operator==(const GemmSpec&) const = default;
};

using KernelSpec = std::variant<AmaxSpec, CastSpec, GemmSpec>;

[[nodiscard]] std::string key(const KernelSpec& spec);
[[nodiscard]] std::string key(const GemmConfig& config);
[[nodiscard]] Result<KernelSpec> parse_kernel_spec(std::string_view text);
[[nodiscard]] Result<GemmConfig> parse_gemm_config(std::string_view text);

// Legal on Hopper: register and shared-memory budgets, tile multiples. The error says which limit
// and by how much; the tuner records it as the reason of a pruned configuration.
[[nodiscard]] Status validate(const KernelSpec& spec);

[[nodiscard]] int threads_per_block(const KernelSpec& spec);
[[nodiscard]] int dynamic_smem_bytes(const KernelSpec& spec);

// Every configuration that the tuner may choose for this GEMM (config is ignored in the argument),
// in no particular order of merit; each of them compiles without spills.
[[nodiscard]] std::vector<GemmConfig> gemm_candidates(const GemmSpec& spec);

}  // namespace f8::codegen
