#include "tools/tuner/fit/regret.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <tuple>

#include "tools/tuner/search/gemm_candidates.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::tuner {
namespace {

using runtime::CostModel;

// The time that a row has: its own, or the time of the screening that it lost.
std::optional<double> time_of(const tuning_db::TrialResult& result) {
  if (result.timing) return result.timing->median_ns;
  return result.screened_ns;
}

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
  std::vector<tuning_db::TrialRow> rows = F8_TRY(database.gemms(tuning_db::Impl::kGenerated));
  std::ranges::move(F8_TRY(database.gemms(tuning_db::Impl::kCublasLt)), std::back_inserter(rows));
  return measured_gemms(rows);
}

std::vector<MeasuredGemm> measured_gemms(std::span<const tuning_db::TrialRow> rows) {
  std::map<std::string, MeasuredGemm> gemms;  // by device and identity
  for (const tuning_db::TrialRow& row : rows) {
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
      gemm.shape = gemm_shape(row.problem.shape(), to_gemm(row.problem.op));
      gemm.linear = row.problem.shape();
      gemm.sm_count = row.device.sm_count;
    }
    add(gemm.timed, {*config, *ns, mad_ns, row.result.timing.has_value()});
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

}  // namespace f8::tuner
