#include "tools/tuner/fit/cost_model_fit.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <tuple>

#include "tools/tuner/search/gemm_candidates.hpp"
#include "tools/tuner/statistics.hpp"
#include "tuning_db/estimate/least_squares.hpp"

namespace f8::tuner {
namespace {

using runtime::CostModel;

constexpr double kTemperature = 0.015;  // a choice by chance takes predictions this near as alike
constexpr double kTail = 0.5;           // the weight of the root mean square beside the mean
constexpr double kShape = 0.05;         // the weight of the predictions' own errors
constexpr double kPull = 2e-4;          // towards the start, where the GEMMs leave a constant open

constexpr double kMostLag = 0.3;     // of the library (log time): more changes no choice
constexpr double kRidge = 1;         // towards 0, where the GEMMs leave a coefficient open
constexpr size_t kRowsPerTerm = 10;  // fewer say nothing of the library

// The time that a row has: its own, or the time of the screening that it lost.
std::optional<double> time_of(const tuning_db::TrialResult& result) {
  if (result.timing) return result.timing->median_ns;
  return result.screened_ns;
}

// The constants as one list of positive numbers. Promoting costs time, so a slower rate of the
// tensor cores is listed as a share of the next faster one.
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

constexpr size_t kPingpong = 7;  // in the list: this one and those from kShares on are at most 1
constexpr size_t kShares = 10;

// Adds the tiles that the model does not have, with average shares.
CostModel with_tiles_of(const std::vector<MeasuredGemm>& gemms, CostModel model) {
  for (const MeasuredGemm& gemm : gemms) {
    for (const TimedConfig& timed : gemm.timed) {
      const GemmConfig& c = timed.config;
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
                  .tiles = like.tiles,
                  .library = like.library,
                  .suggestions = like.suggestions};
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
  Objective(const std::vector<MeasuredGemm>& gemms, const CostModel& start)
      : gemms_(gemms), start_(start), start_list_(to_list(start)) {}

  double operator()(std::span<const double> list) const {
    const CostModel model = to_model(list, start_);
    double lost = 0;
    double lost_squares = 0;
    double missed = 0;
    for (const MeasuredGemm& gemm : gemms_) {
      const Score score = score_of(gemm, model);
      lost += score.lost;
      lost_squares += score.lost * score.lost;
      missed += score.missed;
    }
    const auto count = static_cast<double>(std::max<size_t>(1, gemms_.size()));
    double moved = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      const double by = std::log(list[i] / start_list_[i]);
      moved += by * by;
    }
    return lost / count + kTail * std::sqrt(lost_squares / count) + kShape * missed / count +
           kPull * moved;
  }

 private:
  struct Score {
    double lost = 0;    // the expected regret
    double missed = 0;  // root mean square of the predictions' errors, but for a common factor
  };
  static Score score_of(const MeasuredGemm& gemm, const CostModel& model) {
    double best_ns = gemm.timed.front().ns;
    double best_log = std::numeric_limits<double>::max();
    thread_local std::vector<double> logs;
    logs.clear();
    codegen::GemmSpec spec = gemm.family;
    double error = 0;
    double error_squares = 0;
    for (const TimedConfig& timed : gemm.timed) {
      spec.config = timed.config;
      logs.push_back(std::log(runtime::predicted_clocks(spec, gemm.shape, gemm.sm_count, model)));
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
      lost += weight * (gemm.timed[i].ns / best_ns - 1);
    }
    const auto count = static_cast<double>(logs.size());
    const double mean = error / count;
    return {lost / weights, std::sqrt(std::max(0.0, error_squares / count - mean * mean))};
  }

  const std::vector<MeasuredGemm>& gemms_;
  const CostModel& start_;
  std::vector<double> start_list_;
};

}  // namespace

static double clocks_of(const MeasuredGemm& gemm, const TimedConfig& timed, const CostModel& model,
                        std::span<const runtime::NearbyWinner> nearby) {
  codegen::GemmSpec spec = gemm.family;
  spec.config = timed.config;
  return runtime::voted_clocks(spec, gemm.shape, gemm.sm_count, nearby, model);
}

const TimedConfig& choose(const MeasuredGemm& gemm, const CostModel& model,
                          std::span<const runtime::NearbyWinner> nearby) {
  const TimedConfig* best = nullptr;
  double best_clocks = 0;
  for (const TimedConfig& timed : gemm.timed) {
    const double clocks = clocks_of(gemm, timed, model, nearby);
    const auto rank = [](const GemmConfig& c) {
      return std::tuple(-c.tile_m * c.tile_n, c.raster_group, key(c));
    };
    if (best == nullptr || clocks < best_clocks ||
        (clocks == best_clocks && rank(timed.config) < rank(best->config))) {
      best = &timed;
      best_clocks = clocks;
    }
  }
  return *best;
}

bool takes_library(const MeasuredGemm& gemm, const TimedConfig& chosen, const CostModel& model,
                   std::span<const runtime::NearbyWinner> nearby) {
  return gemm.suggestion_ns() > 0 &&
         runtime::prefers_library(gemm.family, gemm.shape, gemm.sm_count,
                                  clocks_of(gemm, chosen, model, nearby), model);
}

static const TimedConfig& fastest(const MeasuredGemm& gemm) {
  return *std::ranges::min_element(gemm.timed, {}, &TimedConfig::ns);
}

double MeasuredGemm::library_ns() const {
  return library.empty() ? 0 : std::ranges::min(library, {}, &TimedHeuristic::ns).ns;
}

double MeasuredGemm::suggestion_ns() const {
  const auto first = std::ranges::find(library, "h0", &TimedHeuristic::config);
  return first == library.end() ? 0 : first->ns;
}

std::vector<runtime::NearbyWinner> winners_near(const MeasuredGemm& gemm,
                                                const std::vector<MeasuredGemm>& gemms) {
  const auto op = [](const MeasuredGemm& g) { return g.problem.substr(0, g.problem.find('/')); };
  std::vector<runtime::NearbyWinner> winners;
  for (const MeasuredGemm& other : gemms) {
    const bool same_layer = other.linear.n == gemm.linear.n && other.linear.k == gemm.linear.k;
    if (same_layer || other.device != gemm.device || other.family != gemm.family ||
        op(other) != op(gemm)) {
      continue;
    }
    winners.push_back({fastest(other).config, octaves_between(other.linear, gemm.linear)});
  }
  std::ranges::stable_sort(winners, {}, &runtime::NearbyWinner::octaves);
  winners.resize(std::min(winners.size(), runtime::kMostNearby));
  return winners;
}

namespace {

struct Regrets {
  std::vector<double> generated, any;
  double worst = -1;
  std::string worst_of;

  void add(const MeasuredGemm& gemm, const CostModel& model,
           std::span<const runtime::NearbyWinner> nearby = {}) {
    const TimedConfig& chosen = choose(gemm, model, nearby);
    const double best = fastest(gemm).ns;
    generated.push_back(chosen.ns / best - 1);
    if (const double library = gemm.library_ns(); library > 0) {
      const double taken =
          takes_library(gemm, chosen, model, nearby) ? gemm.suggestion_ns() : chosen.ns;
      any.push_back(taken / std::min(best, library) - 1);
    }
    if (generated.back() > worst) {
      worst = generated.back();
      worst_of = gemm.problem;
    }
  }
  [[nodiscard]] Regret regret() const {
    Regret result;
    result.gemms = static_cast<int>(generated.size());
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

// Adds a candidate's time; of several the least counts, and a screening's where there is no other.
static void add(std::vector<TimedConfig>& all, const TimedConfig& timed) {
  const auto known = std::ranges::find(all, timed.config, &TimedConfig::config);
  if (known == all.end()) {
    all.push_back(timed);
  } else if (timed.to_the_end && (!known->to_the_end || timed.ns < known->ns)) {
    *known = timed;
  }
}

static void add(std::vector<TimedHeuristic>& all, const TimedHeuristic& timed) {
  const auto known = std::ranges::find(all, timed.config, &TimedHeuristic::config);
  if (known == all.end()) {
    all.push_back(timed);
  } else if (timed.ns < known->ns) {
    *known = timed;
  }
}

Result<std::vector<MeasuredGemm>> measured_gemms(const tuning_db::Database& database) {
  std::map<std::string, MeasuredGemm> gemms;  // by device and identity
  for (const auto impl : {tuning_db::Impl::kGenerated, tuning_db::Impl::kCublasLt}) {
    for (const tuning_db::TrialRow& row : F8_TRY(database.gemms(impl))) {
      const auto ns = time_of(row.result);
      const auto candidate = from_row(row.candidate);
      const auto family = gemm_spec(row.problem);
      if (!ns || !candidate || !family) continue;
      const std::string device = tuning_db::key(row.device);
      MeasuredGemm& gemm = gemms[device + gemm_identity(row.problem, false)];
      const double mad_ns = row.result.timing ? row.result.timing->mad_ns : 0;
      if (candidate->impl == Impl::kCublasLt) {
        add(gemm.library, {candidate->config, *ns, mad_ns});
        continue;
      }
      const auto config = parse_gemm_config(candidate->config);
      if (!config) continue;
      if (gemm.problem.empty()) {
        gemm.problem = row.problem.key();
        gemm.device = device;
        gemm.device_class = row.device;
        gemm.family = *family;
        gemm.shape = gemm_shape(row.problem.shape, static_cast<Gemm>(row.problem.op));
        gemm.linear = row.problem.shape;
        gemm.sm_count = row.device.sm_count;
      }
      add(gemm.timed, {*config, *ns, mad_ns, row.result.timing.has_value()});
    }
  }
  std::vector<MeasuredGemm> result;
  for (auto& [identity, gemm] : gemms) {
    if (gemm.timed.size() > 1) result.push_back(std::move(gemm));
  }
  return result;
}

Regret regret(const std::vector<MeasuredGemm>& gemms, const CostModel& model) {
  Regrets regrets;
  for (const MeasuredGemm& gemm : gemms) regrets.add(gemm, model);
  return regrets.regret();
}

Regret regret_with_neighbours(const std::vector<MeasuredGemm>& gemms,
                              const std::vector<MeasuredGemm>& known, const CostModel& model) {
  Regrets regrets;
  for (const MeasuredGemm& gemm : gemms) regrets.add(gemm, model, winners_near(gemm, known));
  return regrets.regret();
}

// The coefficients of the library's lag behind the model's choices, to which the rows of other layers
// contribute as they do in a plan. The given ones stay where too few GEMMs have tensor scales.
static void fit_library(const std::vector<MeasuredGemm>& gemms, CostModel& model) {
  constexpr size_t kTerms = CostModel::kLibraryTerms;
  tuning_db::NormalEquations<kTerms> equations;
  for (const MeasuredGemm& gemm : gemms) {
    const double library = gemm.suggestion_ns();
    if (gemm.family.scale != codegen::ScaleMode::kTensor || library == 0) continue;
    const auto nearby = winners_near(gemm, gemms);
    const TimedConfig& chosen = choose(gemm, model, nearby);
    const auto terms =
        runtime::library_terms(gemm.shape, gemm.sm_count, clocks_of(gemm, chosen, model, nearby));
    equations.add(terms, std::clamp(std::log(library / chosen.ns), -kMostLag, kMostLag));
  }
  if (equations.rows() < kRowsPerTerm * kTerms) return;
  if (const auto fitted = equations.solved(kRidge, /*first=*/1)) model.library = *fitted;
}

CostModel fit(const std::vector<MeasuredGemm>& gemms, const CostModel& given,
              const FitOptions& options) {
  const CostModel start = with_tiles_of(gemms, given);
  const Objective objective(gemms, start);
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
  CostModel model = to_model(list, start);
  fit_library(gemms, model);
  return model;
}

std::vector<CostModel> held_out_models(const std::vector<MeasuredGemm>& gemms,
                                       const CostModel& start, int folds,
                                       const FitOptions& options) {
  // A layer's GEMMs under several M go to one fold, because they say too much about each other.
  std::map<std::pair<int64_t, int64_t>, int> fold_of;
  for (const MeasuredGemm& gemm : gemms) {
    fold_of.try_emplace({gemm.linear.n, gemm.linear.k}, 0);
  }
  int next = 0;
  for (auto& [layer, fold] : fold_of) fold = next++ % folds;
  std::vector<CostModel> models(gemms.size());
  for (int fold = 0; fold < folds; ++fold) {
    std::vector<MeasuredGemm> seen;
    std::vector<size_t> held_out;
    for (size_t i = 0; i < gemms.size(); ++i) {
      if (fold_of.at({gemms[i].linear.n, gemms[i].linear.k}) == fold) {
        held_out.push_back(i);
      } else {
        seen.push_back(gemms[i]);
      }
    }
    if (held_out.empty()) continue;
    const CostModel model = fit(seen, start, options);
    for (const size_t i : held_out) models[i] = model;
  }
  return models;
}

Regret cross_validate(const std::vector<MeasuredGemm>& gemms, const CostModel& start, int folds,
                      const FitOptions& options) {
  const std::vector<CostModel> models = held_out_models(gemms, start, folds, options);
  Regrets regrets;
  for (size_t i = 0; i < gemms.size(); ++i) regrets.add(gemms[i], models[i]);
  return regrets.regret();
}

// The coefficients in rows of `columns`, as clang-format lays them out `indent` from the margin.
static std::string coefficients(std::span<const double> values, size_t columns, size_t indent) {
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += i % columns == 0 ? ",\n" + std::string(indent, ' ') : ", ";
    text += f8::format("{:.4f}", values[i]);
  }
  return text;
}

std::string constants_source(const CostModel& model) {
  std::string tiles;
  for (const CostModel::Tile& tile : model.tiles) {
    tiles += f8::format("{}{{{}, {}, {}, {}, {:.3f}, {:.3f}, {:.3f}}}",
                        tiles.empty() ? "" : ",\n                ", tile.tile_m, tile.tile_n,
                        tile.warpgroups, tile.pingpong, tile.fast, tile.precise, tile.block);
  }
  return f8::format(
      R"(// Written by `float8-tune cost-model fit` and `fit-suggestions`; see docs/method.md.
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
      .tiles = {{{}}},
      .library = {{{}}},
      .suggestions = {{{}}}}};
  return kModel;
}}

}}  // namespace f8::runtime
)",
      model.l2_bytes_per_clock, model.port_bytes_per_clock, model.store_bytes_per_clock,
      model.tile_overhead, model.latency, model.launch, model.cluster_skew, model.pingpong_epilogue,
      model.exchange, model.exchange_bytes_per_clock, tiles, coefficients(model.library, 8, 18),
      coefficients(model.suggestions, 8, 22));
}

}  // namespace f8::tuner
