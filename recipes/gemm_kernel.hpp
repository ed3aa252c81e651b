// What computes a GEMM: a generated kernel of some configuration, or one of cuBLASLt's suggestions.
//
//   config := tile "g" INT | "h" INT           of generated: raster group; of cublaslt: its suggestion
//   tile   := INT "x" INT "s" INT "c" INT "x" INT [ "k" INT ] "w" INT [ "p" ]
//             tile_m x tile_n, stages, cluster_m x cluster_n, split-K, warpgroups, ping-pong
// Examples: 128x256s4c2x1w2g8, h3
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace f8 {

struct GemmConfig {
  int tile_m = 128;
  int tile_n = 256;
  int stages = 4;     // of (tile_m + tile_n) x 128 bytes
  int cluster_m = 2;  // CTAs of a cluster along m share the b tile by multicast, along n the a tile
  int cluster_n = 1;
  int split_k = 1;        // cluster split-K: CTAs that share K of a tile and reduce over DSMEM
  int warpgroups = 2;     // consumer warpgroups; one more warpgroup is the producer
  bool pingpong = false;  // each consumer warpgroup works on its own tile, else they share one
  int raster_group = 8;   // tiles of m that rasterisation keeps together; an argument of the launch
  bool operator==(const GemmConfig&) const = default;
};
[[nodiscard]] std::string key(const GemmConfig& config);
[[nodiscard]] Result<GemmConfig> parse_gemm_config(std::string_view text);
// The configuration without its raster group, which the compiled kernel does not depend on.
[[nodiscard]] std::string tile_key(const GemmConfig& config);
[[nodiscard]] Result<GemmConfig> parse_gemm_tile(std::string_view text);

enum class Provider : uint8_t { kGenerated, kCublasLt };
[[nodiscard]] std::string_view to_string(Provider p);

// A plan takes the suggestion that the model of runtime/gemm/suggestions.hpp ranks first.
inline constexpr int kRankedFirst = -1;

struct GemmKernel {
  Provider provider = Provider::kGenerated;
  GemmConfig config = {};  // generated
  int heuristic = 0;       // cublaslt: which of its suggestions, 0 the first, or kRankedFirst
  bool operator==(const GemmKernel&) const = default;
};
// "128x256s4c2x1w2g8" or "h3", as the database and the tuning table keep it; "ranked first"
// stands for kRankedFirst, which they never hold.
[[nodiscard]] std::string config_text(const GemmKernel& kernel);
[[nodiscard]] Result<GemmKernel> parse_gemm_kernel(Provider provider, std::string_view config);

// How often this process has read the text of a configuration: what tests of the tuning table count.
[[nodiscard]] uint64_t parsed_gemm_kernels();

}  // namespace f8
