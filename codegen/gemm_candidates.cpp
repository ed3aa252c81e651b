// The configurations that the tuner may choose among. A tile's stages fill shared memory, but for
// the largest tiles: the room of one more stage is better spent on out buffers, whose stores would
// else wait for each other. The cluster shares the larger operand's tile; what does not fit
// registers or shared memory is not offered.
#include <initializer_list>

#include "codegen/kernel_spec.hpp"
#include "codegen/kernels/kernel_args.cuh"

namespace f8::codegen {
namespace {

struct Cluster {
  int m, n;
  int split_k = 1;
  int raster_group = 16;
};
struct Tile {
  int m, n, warpgroups;
  bool pingpong;
  std::initializer_list<Cluster> clusters;
};

// These are the tiles and clusters that won somewhere when all were measured (docs/kernels.md), the
// small tiles, split-K and clusters of four that small results need, and sizes in between, with which
// some results are whole waves of tiles where the others leave half a wave empty. The raster group
// matters where operands come from L2 fast enough only if the SMs of a GPC share them, most for
// single CTAs of small tiles: 16 of them as a square read the least.
const Tile kTiles[] = {
    {128, 256, 2, false, {{1, 1}, {2, 1}, {1, 2}}},
    {256, 128, 2, false, {{1, 1, 1, 4}, {2, 1}, {1, 2}}},
    {128, 128, 2, true, {{1, 1, 1, 8}, {2, 1, 1, 8}, {1, 2}, {1, 2, 1, 8}}},
    {128, 160, 2, true, {{1, 1, 1, 8}, {2, 1, 1, 8}, {1, 2}}},
    {128, 192, 2, true, {{1, 1, 1, 8}, {2, 1, 1, 8}, {1, 2}}},
    {128, 160, 2, false, {{1, 1}, {2, 1}, {1, 2}}},
    {128, 192, 2, false, {{1, 1}, {2, 1}, {1, 2}, {1, 1, 2, 4}}},
    {128, 224, 2, false, {{1, 1}, {2, 1}, {1, 2}}},
    {192, 128, 3, false, {{1, 1, 1, 4}, {1, 2}}},
    {192, 160, 3, false, {{1, 2}}},
    {192, 96, 3, false, {{1, 2}}},
    {128, 128, 2, false, {{1, 1}, {2, 1}, {1, 2}, {1, 1, 2, 4}, {2, 2}}},
    {128, 96, 2, false, {{1, 2}}},
    {128, 96, 2, true, {{1, 1, 1, 4}}},
    {64, 128, 2, true, {{1, 1, 1, 4}, {1, 2}}},
    {64, 256, 2, true, {{1, 1}}},
    {64, 256, 1, false, {{1, 1}}},
    {64, 192, 1, false, {{1, 1, 1, 4}}},
    {64, 128, 1, false, {{1, 1, 1, 4}, {2, 1}, {1, 2}, {1, 1, 2, 4}, {1, 4}, {2, 2}}},
    {64, 64, 1, false, {{1, 1}, {1, 1, 2, 4}}},
};
constexpr int kMostStages = 8;
constexpr int kLarge = 128 * 192;               // elements of a tile
constexpr int kStageBytesOfLarge = 160 * 1024;  // all of them together

int most_stages(const Tile& tile) {
  if (tile.m * tile.n < kLarge) return kMostStages;
  return kStageBytesOfLarge / ((tile.m + tile.n) * kernels::kStageK);
}

}  // namespace

std::optional<GemmConfig> with_fitting_stages(GemmSpec spec) {
  for (int& stages = spec.config.stages; stages >= 2; --stages) {
    if (validate(spec)) return spec.config;
  }
  return std::nullopt;
}

std::vector<GemmConfig> gemm_candidates(const GemmSpec& spec) {
  std::vector<GemmConfig> candidates;
  for (const Tile& tile : kTiles) {
    for (const Cluster& cluster : tile.clusters) {
      GemmSpec candidate = spec;
      candidate.config = {.tile_m = tile.m,
                          .tile_n = tile.n,
                          .stages = most_stages(tile),
                          .cluster_m = cluster.m,
                          .cluster_n = cluster.n,
                          .split_k = cluster.split_k,
                          .warpgroups = tile.warpgroups,
                          .pingpong = tile.pingpong,
                          .raster_group = cluster.raster_group};
      if (const auto fitting = with_fitting_stages(candidate)) candidates.push_back(*fitting);
    }
  }
  return candidates;
}

}  // namespace f8::codegen
