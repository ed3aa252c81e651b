// The model itself; its constants are in cost_model_constants.cpp.
#include "runtime/gemm/cost_model.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>

namespace f8::runtime {
namespace {

constexpr double kMacsPerClock = 4096;  // fp8 multiply-adds of one SM's tensor cores
constexpr double kBlock = 128;          // elements of K in a stage
constexpr double kVote = 0.12;          // of all nearby winners together, in log time
constexpr double kNearest = 0.05;       // octaves squared: a nearer winner has no larger weight
constexpr double kNoVote =
    0.5;  // the weight of "the model is right", of a winner's 1.2 octaves away

// cuBLASLt is taken where it is expected to be behind by less than this (log time). At the efficiency
// of large GEMMs it has to be ahead: there both are alike, and two generated gradients can share a
// launch and read shards. Found by leaving layers out, see docs/method.md.
constexpr double kLibraryMargin = 0.02;
constexpr double kLargeEfficiency = 0.75;

double efficiency_of(Shape shape, int sm_count, double clocks) {
  return static_cast<double>(shape.m) * static_cast<double>(shape.n) *
         static_cast<double>(shape.k) / kMacsPerClock / std::max(1, sm_count) / clocks;
}

double efficiency(const CostModel& model, const codegen::GemmSpec& spec) {
  const GemmConfig& config = spec.config;
  for (const CostModel::Tile& tile : model.tiles) {
    if (tile.tile_m == config.tile_m && tile.tile_n == config.tile_n &&
        tile.warpgroups == config.warpgroups && tile.pingpong == config.pingpong) {
      return is_block(spec.scale) ? tile.block : spec.fast ? tile.fast : tile.precise;
    }
  }
  return spec.fast ? 0.6 : 0.45;  // a tile that was never measured
}

double whole_parts(double a, double b) {
  return std::ceil(a / b);
}

// The share of the votes for this candidate. Its stages are what fits next to an epilogue.
double share_of_votes(GemmConfig candidate, std::span<const NearbyWinner> nearby) {
  double all = kNoVote;
  double own = 0;
  for (const NearbyWinner& winner : nearby) {
    const double weight = 1 / (winner.octaves * winner.octaves + kNearest);
    all += weight;
    candidate.stages = winner.config.stages;
    if (candidate == winner.config) own += weight;
  }
  return own / all;
}

}  // namespace

double predicted_clocks(const codegen::GemmSpec& spec, Shape shape, int sm_count,
                        const CostModel& model) {
  const GemmConfig& config = spec.config;
  const double m = static_cast<double>(shape.m);
  const double n = static_cast<double>(shape.n);
  const double k = static_cast<double>(shape.k);
  const double tiles_m = whole_parts(m, config.tile_m);
  const double tiles_n = whole_parts(n, config.tile_n);
  const int cluster = config.cluster_m * config.cluster_n * config.split_k;
  // A cluster takes a work tile of cluster_m x cluster_n tiles; CTAs outside of d are idle.
  const double tiles =
      whole_parts(tiles_m, config.cluster_m) * whole_parts(tiles_n, config.cluster_n);
  const double clusters = std::max(1, sm_count / cluster);
  const double waves = whole_parts(tiles, clusters);
  const double blocks = whole_parts(whole_parts(k, kBlock), config.split_k);

  const double math = static_cast<double>(config.tile_m) * config.tile_n * kBlock / kMacsPerClock /
                      efficiency(model, spec);
  // Multicast shares what a cluster has in common.
  const double bytes = kBlock * (static_cast<double>(config.tile_m) / config.cluster_n +
                                 static_cast<double>(config.tile_n) / config.cluster_m);
  const double reading = std::min(tiles, clusters) * cluster / std::max(1, sm_count);
  const double copy =
      bytes * std::max(reading / model.l2_bytes_per_clock, 1 / model.port_bytes_per_clock);
  // Loads run ahead by as many blocks as there are stages: with few of them the latency shows.
  const double block = std::max({math, copy, model.latency / config.stages});

  const double store = static_cast<double>(config.tile_m) * config.tile_n *
                       (spec.d == Dtype::kF32 ? 4 : 2) / model.store_bytes_per_clock;
  // Ping-pong hides a tile's epilogue behind its neighbour's MMAs.
  double epilogue = (store / config.split_k + model.tile_overhead) *
                    (config.pingpong ? model.pingpong_epilogue : 1.0);
  // Cluster split-K reduces the sums of its CTAs through DSMEM.
  if (config.split_k > 1) {
    epilogue += model.exchange + static_cast<double>(config.tile_m) * config.tile_n * 4 *
                                     (config.split_k - 1) / config.split_k /
                                     model.exchange_bytes_per_clock;
  }
  return waves * (blocks * block + epilogue) + model.launch + model.cluster_skew * (cluster - 1);
}

double voted_clocks(const codegen::GemmSpec& spec, Shape shape, int sm_count,
                    std::span<const NearbyWinner> nearby, const CostModel& model) {
  return std::exp(-kVote * share_of_votes(spec.config, nearby)) *
         predicted_clocks(spec, shape, sm_count, model);
}

Result<GemmConfig> cheapest_config(const codegen::GemmSpec& spec, Shape shape, int sm_count,
                                   std::span<const NearbyWinner> nearby, int64_t groups) {
  const std::vector<GemmConfig> candidates = codegen::gemm_candidates(spec);
  if (candidates.empty()) {
    return fail(ErrorCode::kUnsupported, "no generated kernel multiplies {} by {} into {}",
                to_string(spec.a), to_string(spec.b), to_string(spec.d));
  }
  struct Ranked {
    double clocks;
    int area;
    std::string key;
    GemmConfig config;
  };
  std::vector<Ranked> ranked;
  ranked.reserve(candidates.size());
  for (const GemmConfig& config : candidates) {
    if (config.cluster_m * config.cluster_n * config.split_k > std::max(1, sm_count)) continue;
    codegen::GemmSpec candidate = spec;
    candidate.config = config;
    const Shape computed = {shape.m + groups * config.tile_m / 2, shape.n, shape.k};
    ranked.push_back({voted_clocks(candidate, computed, sm_count, nearby),
                      config.tile_m * config.tile_n, key(config), config});
  }
  const auto better = [](const Ranked& x, const Ranked& y) {
    if (x.clocks != y.clocks) return x.clocks < y.clocks;
    if (x.area != y.area) return x.area > y.area;
    if (x.config.raster_group != y.config.raster_group)
      return x.config.raster_group < y.config.raster_group;
    return x.key < y.key;
  };
  return std::min_element(ranked.begin(), ranked.end(), better)->config;
}

std::array<double, CostModel::kLibraryTerms> library_terms(Shape shape, int sm_count,
                                                           double clocks) {
  std::array<double, CostModel::kLibraryTerms> terms = {1};
  size_t next = 1;
  const auto add = [&](double value, std::initializer_list<double> bends) {
    const double x = std::log2(value);
    terms[next++] = x - *(bends.begin() + bends.size() / 2);
    for (const double bend : bends) terms[next++] = std::max(0.0, x - bend);
  };
  add(static_cast<double>(shape.m), {7, 9, 11, 13});
  add(static_cast<double>(shape.n), {9, 11, 13});
  add(static_cast<double>(shape.k), {8, 10, 12, 14});
  add(efficiency_of(shape, sm_count, clocks), {-2, -1, -0.6});
  return terms;
}

bool prefers_library(const codegen::GemmSpec& spec, Shape shape, int sm_count, double clocks,
                     const CostModel& model) {
  if (spec.scale != codegen::ScaleMode::kTensor) return false;
  const auto terms = library_terms(shape, sm_count, clocks);
  const double lag = std::inner_product(terms.begin(), terms.end(), model.library.begin(), 0.0);
  return lag < (efficiency_of(shape, sm_count, clocks) < kLargeEfficiency ? kLibraryMargin : 0);
}

}  // namespace f8::runtime
