// The configurations that the tuner may choose among. A tile's stages fill what shared memory leaves; the
// cluster shares the larger operand's tile; what does not fit registers or shared memory is not offered.
#include <algorithm>

#include "codegen/kernel_spec.hpp"

namespace f8::codegen {
namespace {

struct Tile {
  int m, n, warpgroups;
  bool pingpong;
};

constexpr Tile kTiles[] = {
    {128, 256, 2, false}, {128, 192, 2, false}, {128, 128, 2, false}, {256, 128, 2, false},
    {128, 64, 2, false},  {64, 256, 1, false},  {64, 128, 1, false},  {64, 64, 1, false},
    {64, 256, 2, true},   {64, 192, 2, true},   {64, 128, 2, true},   {128, 128, 2, true},
};
constexpr std::pair<int, int> kClusters[] = {{1, 1}, {2, 1}, {1, 2}};
constexpr int kMostStages = 8;

}  // namespace

std::vector<GemmConfig> gemm_candidates(const GemmSpec& spec) {
  std::vector<GemmConfig> candidates;
  for (const Tile& tile : kTiles) {
    for (const auto& [cluster_m, cluster_n] : kClusters) {
      GemmSpec candidate = spec;
      candidate.config = {.tile_m = tile.m,
                          .tile_n = tile.n,
                          .stages = kMostStages,
                          .cluster_m = cluster_m,
                          .cluster_n = cluster_n,
                          .warpgroups = tile.warpgroups,
                          .pingpong = tile.pingpong,
                          .group = 8};
      GemmConfig& config = candidate.config;
      while (config.stages > 2 && !validate(candidate)) --config.stages;
      if (!validate(candidate)) continue;
      for (const int group : {8, 16}) {
        config.group = group;
        candidates.push_back(config);
      }
    }
  }
  return candidates;
}

}  // namespace f8::codegen
