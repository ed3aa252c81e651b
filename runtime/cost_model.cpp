// The constants order candidates, they do not predict seconds. They are fitted to the built-in H100
// sweep (180 products, all candidates that were timed): the choice is 1.2 % slower than the best of
// those in the median, 6.6 % at the 95th percentile.
#include "runtime/cost_model.hpp"

#include <algorithm>
#include <cmath>

namespace f8::runtime {
namespace {

constexpr double kMacsPerClock = 4096;      // fp8 multiply-adds of one SM's tensor cores
constexpr double kL2BytesPerClock = 48;     // of one SM from L2 while all of them read
constexpr double kStoreBytesPerClock = 33;  // of the result, registers to L2
constexpr double kTileOverhead = 710;       // draining wgmma, scales, setting up the store
constexpr double kLatency = 970;            // from asking for a stage to having it
constexpr double kLaunch = 1330;            // once
constexpr double kClusterSkew = 190;        // once for each further CTA of a cluster
constexpr double kPingpongEpilogue =
    0.4;                            // the part of it that the other tile's products do not hide
constexpr double kBlock = 128;      // of the contraction
constexpr double kExchange = 1200;  // a split's three barriers of the cluster
constexpr double kExchangeBytesPerClock = 40;  // of its sums, there and back

// The share of the tensor cores' rate that a tile's main loop sustains. Precise accumulation
// promotes between the products; with ping-pong no other warpgroup's products hide that.
struct Efficiency {
  int tile_m, tile_n, warpgroups;
  bool pingpong;
  double fast, precise;
};
constexpr Efficiency kEfficiencies[] = {
    {128, 256, 2, false, 0.798, 0.793}, {256, 128, 2, false, 0.782, 0.781},
    {128, 128, 2, true, 0.789, 0.515},  {128, 192, 2, false, 0.817, 0.755},
    {128, 128, 2, false, 0.771, 0.657}, {64, 128, 2, true, 0.688, 0.492},
    {64, 256, 2, true, 0.707, 0.554},   {64, 256, 1, false, 0.703, 0.522},
    {64, 128, 1, false, 0.599, 0.476},  {64, 64, 1, false, 0.360, 0.348},
};

double efficiency(const codegen::GemmConfig& config, bool fast) {
  for (const Efficiency& e : kEfficiencies) {
    if (e.tile_m == config.tile_m && e.tile_n == config.tile_n &&
        e.warpgroups == config.warpgroups && e.pingpong == config.pingpong) {
      return fast ? e.fast : e.precise;
    }
  }
  return fast ? 0.6 : 0.45;  // a tile that was never measured
}

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
  const int cluster = config.cluster_m * config.cluster_n * config.split_k;
  // A cluster takes whole blocks of cluster_m x cluster_n tiles; the ones outside are idle.
  const double tiles = ceil_div(tiles_m, config.cluster_m) * ceil_div(tiles_n, config.cluster_n);
  const double workers = std::max(1, sm_count / cluster);
  const double waves = ceil_div(tiles, workers);
  const double blocks = ceil_div(ceil_div(k, kBlock), config.split_k);

  const double math = static_cast<double>(config.tile_m) * config.tile_n * kBlock / kMacsPerClock /
                      efficiency(config, spec.fast);
  // Multicast shares what a cluster has in common.
  const double bytes = kBlock * (static_cast<double>(config.tile_m) / config.cluster_n +
                                 static_cast<double>(config.tile_n) / config.cluster_m);
  const double copy = bytes / kL2BytesPerClock;
  // Copies run ahead by as many blocks as there are stages: with few of them the latency shows.
  const double block = std::max({math, copy, kLatency / config.stages});

  const double store = static_cast<double>(config.tile_m) * config.tile_n *
                       (spec.d == Dtype::kF32 ? 4 : 2) / kStoreBytesPerClock;
  // Ping-pong hides a tile's epilogue behind its neighbour's matmul.
  double epilogue =
      (store / config.split_k + kTileOverhead) * (config.pingpong ? kPingpongEpilogue : 1.0);
  // Sums go to the other CTAs of a split and are added there.
  if (config.split_k > 1) {
    epilogue += kExchange + static_cast<double>(config.tile_m) * config.tile_n * 4 *
                                (config.split_k - 1) / config.split_k / kExchangeBytesPerClock;
  }
  return waves * (blocks * block + epilogue) + kLaunch + kClusterSkew * (cluster - 1);
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
