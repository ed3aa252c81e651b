#include "tools/tuner/search/cost_model_fit.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>

#include "tools/tuner/search/gemm_candidates.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::tuner {
namespace {

using runtime::CostModel;

constexpr double kTemperature = 0.015;  // of a choice by chance: predictions this near are alike
constexpr double kTail = 0.5;           // the weight of the root mean square beside the mean
constexpr double kShape = 0.05;         // the weight of the predictions' own errors
constexpr double kPull = 2e-4;          // towards the start, for what the products do not say

// The time that a row has: its own, or that of the screening that it lost.
std::optional<double> time_of(const tuning_db::TrialResult& result) {
  if (result.timing) return result.timing->median_ns;
  return result.screened_ns;
}

// The constants as one list of positive numbers; promoting costs, so that its shares of the tensor
// cores' rate are shares of the faster one.
std::vector<double> to_list(const CostModel& model) {
  std::vector<double> list = {model.l2_bytes_per_clock,
                              model.port_bytes_per_clock,
                              model.store_bytes_per_clock,
                              model.tile_overhead,
                              model.latency,
                              model.launch,
                              model.cluster_skew,
                              model.pingpong_epilogue,
                              model.exchange,
                              model.exchange_bytes_per_clock};
  for (const CostModel::Tile& tile : model.tiles) {
    for (const double share : {tile.fast, tile.precise / tile.fast, tile.block / tile.precise}) {
      list.push_back(share);
    }
  }
  return list;
}

constexpr size_t kPingpong = 7;  // in the list: the first of those that are at most 1
constexpr size_t kShares = 10;   // and where the others begin

// A tile that the model has not heard of begins as one of its size would.
CostModel with_tiles_of(const std::vector<MeasuredProduct>& products, CostModel model) {
  for (const MeasuredProduct& product : products) {
    for (const TimedConfig& timed : product.timed) {
      const codegen::GemmConfig& c = timed.config;
      const auto is_it = [&](const CostModel::Tile& tile) {
        return tile.tile_m == c.tile_m && tile.tile_n == c.tile_n &&
               tile.warpgroups == c.warpgroups && tile.pingpong == c.pingpong;
      };
      if (std::ranges::any_of(model.tiles, is_it)) continue;
      model.tiles.push_back({c.tile_m, c.tile_n, c.warpgroups, c.pingpong, 0.6, 0.45, 0.4});
    }
  }
  return model;
}

CostModel to_model(std::span<const double> list, const CostModel& like) {
  CostModel model{.l2_bytes_per_clock = list[0],
                  .port_bytes_per_clock = list[1],
                  .store_bytes_per_clock = list[2],
                  .tile_overhead = list[3],
                  .latency = list[4],
                  .launch = list[5],
                  .cluster_skew = list[6],
                  .pingpong_epilogue = list[kPingpong],
                  .exchange = list[8],
                  .exchange_bytes_per_clock = list[9],
                  .tiles = like.tiles};
  for (size_t i = 0; i < model.tiles.size(); ++i) {
    const double* share = &list[kShares + 3 * i];
    CostModel::Tile& tile = model.tiles[i];
    tile.fast = share[0];
    tile.precise = tile.fast * share[1];
    tile.block = tile.precise * share[2];
  }
  return model;
}

class Objective {
 public:
  Objective(const std::vector<MeasuredProduct>& products, const CostModel& start)
      : products_(products), start_(start), start_list_(to_list(start)) {}

  double operator()(std::span<const double> list) const {
    const CostModel model = to_model(list, start_);
    double lost = 0;
    double lost_squares = 0;
    double missed = 0;
    for (const MeasuredProduct& product : products_) {
      const Fault fault = fault_of(product, model);
      lost += fault.lost;
      lost_squares += fault.lost * fault.lost;
      missed += fault.missed;
    }
    const auto count = static_cast<double>(std::max<size_t>(1, products_.size()));
    double moved = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      const double by = std::log(list[i] / start_list_[i]);
      moved += by * by;
    }
    return lost / count + kTail * std::sqrt(lost_squares / count) + kShape * missed / count +
           kPull * moved;
  }

 private:
  struct Fault {
    double lost = 0;    // the expected regret
    double missed = 0;  // root mean square of the predictions' errors, but for a common factor
  };
  static Fault fault_of(const MeasuredProduct& product, const CostModel& model) {
    double best_ns = product.timed.front().ns;
    double best_log = std::numeric_limits<double>::max();
    thread_local std::vector<double> logs;
    logs.clear();
    codegen::GemmSpec spec = product.family;
    double error = 0;
    double error_squares = 0;
    for (const TimedConfig& timed : product.timed) {
      spec.config = timed.config;
      logs.push_back(
          std::log(runtime::predicted_clocks(spec, product.own, product.sm_count, model)));
      const double off = logs.back() - std::log(timed.ns);
      error += off;
      error_squares += off * off;
      best_ns = std::min(best_ns, timed.ns);
      best_log = std::min(best_log, logs.back());
    }
    double weights = 0;
    double lost = 0;
    for (size_t i = 0; i < logs.size(); ++i) {
      const double weight = std::exp((best_log - logs[i]) / kTemperature);
      weights += weight;
      lost += weight * (product.timed[i].ns / best_ns - 1);
    }
    const auto count = static_cast<double>(logs.size());
    const double mean = error / count;
    return {lost / weights, std::sqrt(std::max(0.0, error_squares / count - mean * mean))};
  }

  const std::vector<MeasuredProduct>& products_;
  const CostModel& start_;
  std::vector<double> start_list_;
};

// As cheapest_config decides between equals.
const TimedConfig& choose(const MeasuredProduct& product, const CostModel& model) {
  const TimedConfig* best = nullptr;
  double best_clocks = 0;
  codegen::GemmSpec spec = product.family;
  for (const TimedConfig& timed : product.timed) {
    spec.config = timed.config;
    const double clocks = runtime::predicted_clocks(spec, product.own, product.sm_count, model);
    const auto rank = [](const codegen::GemmConfig& c) {
      return std::tuple(-c.tile_m * c.tile_n, c.raster_group, codegen::key(c));
    };
    if (best == nullptr || clocks < best_clocks ||
        (clocks == best_clocks && rank(timed.config) < rank(best->config))) {
      best = &timed;
      best_clocks = clocks;
    }
  }
  return *best;
}

struct Losses {
  std::vector<double> generated, any;
  double worst = -1;
  std::string worst_of;

  void add(const MeasuredProduct& product, const CostModel& model) {
    const double chosen = choose(product, model).ns;
    const double best = std::ranges::min_element(product.timed, {}, &TimedConfig::ns)->ns;
    generated.push_back(chosen / best - 1);
    if (product.library_ns > 0) any.push_back(chosen / std::min(best, product.library_ns) - 1);
    if (generated.back() > worst) {
      worst = generated.back();
      worst_of = product.problem;
    }
  }
  [[nodiscard]] Regret regret() const {
    Regret result;
    result.products = static_cast<int>(generated.size());
    if (generated.empty()) return result;
    result.median = median(generated);
    result.p95 = percentile(generated, 0.95);
    result.worst = worst;
    result.worst_of = worst_of;
    if (any.empty()) return result;
    result.median_to_any = median(any);
    result.p95_to_any = percentile(any, 0.95);
    return result;
  }
};

}  // namespace

Result<std::vector<MeasuredProduct>> measured_products(const tuning_db::Database& database) {
  const std::vector<tuning_db::DeviceClass> devices = F8_TRY(database.devices());
  std::map<std::string, MeasuredProduct> products;  // by identity
  std::map<std::string, std::set<std::string>> seen;
  if (devices.empty()) return std::vector<MeasuredProduct>{};
  const std::string device = devices.front().key();
  for (const auto impl : {tuning_db::Impl::kGenerated, tuning_db::Impl::kCublasLt}) {
    for (const tuning_db::TrialRow& row : F8_TRY(database.gemms(impl))) {
      const auto ns = time_of(row.result);
      const auto subject = to_subject(row.candidate);
      const auto family = gemm_spec(row.problem);
      if (!ns || !subject || !family || row.device.key() != device) continue;
      MeasuredProduct& product = products[gemm_identity(row.problem, false)];
      if (impl == tuning_db::Impl::kCublasLt) {
        product.library_ns = product.library_ns > 0 ? std::min(product.library_ns, *ns) : *ns;
        continue;
      }
      const auto config = codegen::parse_gemm_config(subject->config);
      if (!config) continue;
      if (product.problem.empty()) {
        product.problem = row.problem.key();
        product.family = *family;
        product.own = gemm_shape(row.problem.shape, static_cast<Gemm>(row.problem.op));
        product.linear = row.problem.shape;
        product.sm_count = row.device.sm_count;
      }
      const auto known = std::ranges::find(product.timed, *config, &TimedConfig::config);
      if (known == product.timed.end()) {
        product.timed.push_back({*config, *ns});
      } else if (row.result.timing) {
        known->ns = std::min(known->ns, *ns);
      }
    }
  }
  std::vector<MeasuredProduct> result;
  for (auto& [identity, product] : products) {
    if (product.timed.size() > 1) result.push_back(std::move(product));
  }
  return result;
}

Regret regret(const std::vector<MeasuredProduct>& products, const CostModel& model) {
  Losses losses;
  for (const MeasuredProduct& product : products) losses.add(product, model);
  return losses.regret();
}

CostModel fit(const std::vector<MeasuredProduct>& products, const CostModel& given,
              const FitOptions& options) {
  const CostModel start = with_tiles_of(products, given);
  const Objective objective(products, start);
  std::vector<double> list = to_list(start);
  double best = objective(list);
  for (int round = 0; round < options.rounds; ++round) {
    for (double step = options.first_step; step >= options.last_step; step /= 2) {
      for (int pass = 0; pass < options.passes; ++pass) {
        bool moved = false;
        for (size_t i = 0; i < list.size(); ++i) {
          const double was = list[i];
          for (const double factor : {1 + step, 1 / (1 + step)}) {
            list[i] = was * factor;
            if (i == kPingpong || i >= kShares) list[i] = std::min(list[i], 1.0);
            const double now = objective(list);
            if (now < best - 1e-9) {
              best = now;
              moved = true;
              break;
            }
            list[i] = was;
          }
        }
        if (!moved) break;
      }
    }
  }
  return to_model(list, start);
}

Regret cross_validate(const std::vector<MeasuredProduct>& products, const CostModel& start,
                      int folds, const FitOptions& options) {
  // A layer's products under several M go to one fold: they know too much of each other.
  std::map<std::pair<int64_t, int64_t>, int> fold_of;
  for (const MeasuredProduct& product : products) {
    fold_of.try_emplace({product.linear.n, product.linear.k}, 0);
  }
  int next = 0;
  for (auto& [layer, fold] : fold_of) fold = next++ % folds;
  Losses losses;
  for (int fold = 0; fold < folds; ++fold) {
    std::vector<MeasuredProduct> seen;
    std::vector<const MeasuredProduct*> held_out;
    for (const MeasuredProduct& product : products) {
      if (fold_of.at({product.linear.n, product.linear.k}) == fold) {
        held_out.push_back(&product);
      } else {
        seen.push_back(product);
      }
    }
    if (held_out.empty()) continue;
    const CostModel model = fit(seen, start, options);
    for (const MeasuredProduct* product : held_out) losses.add(*product, model);
  }
  return losses.regret();
}

std::string constants_source(const CostModel& model) {
  std::string tiles;
  for (const CostModel::Tile& tile : model.tiles) {
    tiles += fmt::format("{}{{{}, {}, {}, {}, {:.3f}, {:.3f}, {:.3f}}}",
                         tiles.empty() ? "" : ",\n                ", tile.tile_m, tile.tile_n,
                         tile.warpgroups, tile.pingpong, tile.fast, tile.precise, tile.block);
  }
  return fmt::format(
      R"(// Written by `float8-tune cost-model fit`; see docs/method.md.
#include "runtime/gemm/cost_model.hpp"

namespace f8::runtime {{

const CostModel& CostModel::fitted() {{
  static const CostModel kModel = {{
      .l2_bytes_per_clock = {:.4g},
      .port_bytes_per_clock = {:.4g},
      .store_bytes_per_clock = {:.4g},
      .tile_overhead = {:.4g},
      .latency = {:.4g},
      .launch = {:.4g},
      .cluster_skew = {:.4g},
      .pingpong_epilogue = {:.3g},
      .exchange = {:.4g},
      .exchange_bytes_per_clock = {:.4g},
      .tiles = {{{}}}}};
  return kModel;
}}

}}  // namespace f8::runtime
)",
      model.l2_bytes_per_clock, model.port_bytes_per_clock, model.store_bytes_per_clock,
      model.tile_overhead, model.latency, model.launch, model.cluster_skew, model.pingpong_epilogue,
      model.exchange, model.exchange_bytes_per_clock, tiles);
}

}  // namespace f8::tuner
