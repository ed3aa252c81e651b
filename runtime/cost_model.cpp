// The constants are Hopper's, per SM and clock; they order candidates, they do not predict seconds.
#include "runtime/cost_model.hpp"

#include <algorithm>
#include <cmath>

namespace f8::runtime {
namespace {

constexpr double kMacsPerClock = 4096;      // fp8 multiply-adds of one SM's tensor cores
constexpr double kL2BytesPerClock = 48;     // of one SM from L2 while all of them read
constexpr double kBlockOverhead = 40;       // barrier round trip of a stage, not hidden
constexpr double kStoreBytesPerClock = 20;  // of the result, registers to L2
constexpr double kTileOverhead = 700;       // draining wgmma, scales, setting up the store
constexpr double kLatency = 800;            // from asking for a stage to having it
constexpr double kBlock = 128;              // of the contraction

double ceil_div(double a, double b) {
  return std::ceil(a / b);
}

}  // namespace

double predicted_clocks(const codegen::GemmSpec& spec, Shape shape, int sm_count) {
  const codegen::GemmConfig& config = spec.config;
  const double m = static_cast<double>(shape.m);
  const double n = static_cast<double>(shape.n);
  const double k = static_cast<double>(shape.k);
  const double tiles_m = ceil_div(m, config.tile_m);
  const double tiles_n = ceil_div(n, config.tile_n);
  const int cluster = config.cluster_m * config.cluster_n;
  // A cluster takes whole blocks of cluster_m x cluster_n tiles; the ones outside are idle.
  const double tiles = ceil_div(tiles_m, config.cluster_m) * ceil_div(tiles_n, config.cluster_n);
  const double workers = std::max(1, sm_count / cluster);
  const double waves = ceil_div(tiles, workers);
  const double blocks = ceil_div(k, kBlock);

  // Promotion to fp32 costs issue slots between the wgmmas of a block.
  const double promotion =
      spec.fast ? 0 : static_cast<double>(config.tile_m) * config.tile_n / (128.0 * 4);
  const double math = static_cast<double>(config.tile_m) * config.tile_n * kBlock / kMacsPerClock +
                      promotion * (config.pingpong ? 0.5 : 1.0);
  // Multicast shares what a cluster has in common.
  const double bytes = kBlock * (static_cast<double>(config.tile_m) / config.cluster_n +
                                 static_cast<double>(config.tile_n) / config.cluster_m);
  const double copy = bytes / kL2BytesPerClock;
  // Copies run ahead by as many blocks as there are stages: with few of them the latency shows.
  const double block = std::max({math + kBlockOverhead, copy, kLatency / config.stages});

  const double store = static_cast<double>(config.tile_m) * config.tile_n *
                       (spec.d == Dtype::kF32 ? 4 : 2) / kStoreBytesPerClock;
  // Ping-pong hides a tile's epilogue behind its neighbour's matmul.
  const double epilogue = (store + kTileOverhead) * (config.pingpong ? 0.35 : 1.0);
  const double skew = 150.0 * (cluster - 1);  // cluster barriers
  return waves * (blocks * block + epilogue) + kLatency + skew;
}

Result<codegen::GemmConfig> cheapest_config(const codegen::GemmSpec& spec, Shape shape,
                                            int sm_count) {
  const std::vector<codegen::GemmConfig> candidates = codegen::gemm_candidates(spec);
  if (candidates.empty()) {
    return fail(ErrorCode::kUnsupported, "no generated kernel multiplies {} by {} into {}",
                to_string(spec.a), to_string(spec.b), to_string(spec.d));
  }
  struct Ranked {
    double clocks;
    int area;
    std::string key;
    codegen::GemmConfig config;
  };
  std::vector<Ranked> ranked;
  ranked.reserve(candidates.size());
  for (const codegen::GemmConfig& config : candidates) {
    codegen::GemmSpec candidate = spec;
    candidate.config = config;
    ranked.push_back({predicted_clocks(candidate, shape, sm_count), config.tile_m * config.tile_n,
                      codegen::key(config), config});
  }
  const auto better = [](const Ranked& x, const Ranked& y) {
    if (x.clocks != y.clocks) return x.clocks < y.clocks;
    if (x.area != y.area) return x.area > y.area;
    if (x.config.group != y.config.group) return x.config.group < y.config.group;
    return x.key < y.key;
  };
  return std::min_element(ranked.begin(), ranked.end(), better)->config;
}

}  // namespace f8::runtime
