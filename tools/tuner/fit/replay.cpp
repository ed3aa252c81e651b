#include "tools/tuner/fit/replay.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numbers>

#include "tools/tuner/measure/measurer.hpp"
#include "tools/tuner/search/sweep/gemm_search.hpp"
#include "tools/tuner/search/sweep/sweep.hpp"

namespace f8::tuner {
namespace {

constexpr double kLaunchAlone = 1.2;  // a launch by itself takes so much longer than one of a batch
constexpr double kMadToSigma = 1.4826;  // of a normal distribution
constexpr double kLeastNoise = 0.001;

struct Stored {
  double ns = 0;
  double noise = 0;  // relative standard deviation of a batch
};
using StoredTimes = std::map<std::string, Stored>;  // by candidate

// Answers with stored times. Batches vary as the stored ones did.
class ReplayBackend final : public Backend {
 public:
  ReplayBackend(const StoredTimes& times, const runtime::DeviceInfo& device, uint64_t seed)
      : times_(times), device_(device), random_(seed) {}

  const runtime::DeviceInfo& device() const override { return device_; }
  Result<Suggested> suggestions(const Problem&, bool) override { return Suggested{}; }
  Status open(const Problem&, L2State) override {
    open_.clear();
    return {};
  }
  Result<Built> add(const Candidate& candidate) override {
    const auto found = times_.find(candidate_key(candidate));
    if (found == times_.end()) return fail(ErrorCode::kUnsupported, "it is not in the set");
    open_.push_back({found->second, 1});
    now_s_ += kCandidateS;
    Built built;
    built.id = static_cast<int>(open_.size()) - 1;
    return built;
  }
  Result<Check> verify(int) override { return Check{}; }
  Result<double> estimate_ns(int candidate) override { return at(candidate).ns * kLaunchAlone; }
  Status set_batch(int candidate, int launches) override {
    open_[static_cast<size_t>(candidate)].launches = launches;
    return {};
  }
  Result<std::vector<double>> time(std::span<const int> order) override {
    std::vector<double> times;
    for (const int candidate : order) {
      const Stored& stored = at(candidate);
      times.push_back(stored.ns * std::max(0.5, 1 + stored.noise * normal()));
      now_s_ += times.back() * 1e-9 * open_[static_cast<size_t>(candidate)].launches;
    }
    return times;
  }
  DeviceState sample() override { return {}; }
  double now_s() const override { return now_s_; }
  void sleep_s(double seconds) override { now_s_ += seconds; }

 private:
  struct Open {
    Stored stored;
    int launches = 1;
  };
  [[nodiscard]] const Stored& at(int candidate) const {
    return open_[static_cast<size_t>(candidate)].stored;
  }
  double normal() {
    const double u = 1 - random_.uniform();
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * random_.uniform());
  }

  const StoredTimes& times_;
  runtime::DeviceInfo device_;
  Random random_;
  std::vector<Open> open_;
  double now_s_ = 0;
};

runtime::DeviceInfo device_of(const MeasuredGemm& gemm) {
  runtime::DeviceInfo device;
  static_cast<DeviceClass&>(device) = gemm.device_class;
  return device;
}

StoredTimes stored_times(const MeasuredGemm& gemm) {
  StoredTimes times;
  const auto add = [&](const Candidate& candidate, double ns, double mad_ns) {
    times[candidate_key(candidate)] = {ns, std::max(kLeastNoise, kMadToSigma * mad_ns / ns)};
  };
  for (const TimedConfig& timed : gemm.timed) {
    add({.impl = Impl::kGenerated, .config = key(timed.config)}, timed.ns, timed.mad_ns);
  }
  for (const TimedHeuristic& timed : gemm.library) {
    add({.impl = Impl::kCublasLt, .config = timed.config}, timed.ns, timed.mad_ns);
  }
  return times;
}

runtime::GemmChoice choice_of(const MeasuredGemm& gemm,
                              std::span<const runtime::NearbyWinner> nearby) {
  const runtime::CostModel& model = runtime::CostModel::fitted();
  const TimedConfig& chosen = choose(gemm, model, nearby);
  if (takes_library(gemm, chosen, model, nearby)) {
    return {{.provider = Provider::kCublasLt}};
  }
  return {{.config = chosen.config}};
}

// What a plan takes without a search: by the model alone, and with the rows of other layers.
std::array<runtime::GemmChoice, 2> prior_of(const ExhaustiveGemm& gemm) {
  return {choice_of(gemm.measured, gemm.nearby), choice_of(gemm.measured, {})};
}

// The candidates that a sweep measures if those stored are all that there are.
std::vector<Candidate> candidates_of(const ExhaustiveGemm& gemm, const SweepOptions& options,
                                     std::span<const runtime::GemmChoice> prior,
                                     const StoredTimes& times) {
  const MeasuredGemm& measured = gemm.measured;
  std::vector<GemmConfig> stored;
  for (const TimedConfig& timed : measured.timed) stored.push_back(timed.config);
  std::vector<Candidate> candidates;
  for (const Generated& generated : in_order(measured.family, measured.shape, stored,
                                             device_of(measured), options.keep, prior)) {
    if (!generated.pruned.empty()) continue;
    candidates.push_back({.impl = Impl::kGenerated, .config = key(generated.spec.config)});
  }
  for (int i = 0; i < options.heuristics; ++i) {
    Candidate suggestion = {.impl = Impl::kCublasLt, .config = f8::format("h{}", i)};
    if (times.contains(candidate_key(suggestion))) candidates.push_back(std::move(suggestion));
  }
  return candidates;
}

Result<std::vector<std::optional<double>>> times_of(Measurer& measurer, InterleavedGroup group,
                                                    std::vector<Candidate> candidates) {
  group.candidates = std::move(candidates);
  std::vector<std::optional<double>> times;
  for (const CandidateOutcome& outcome : F8_TRY(measurer.run(group))) {
    const auto& timing = outcome.result.timing;
    times.push_back(timing ? std::optional(timing->median_ns) : std::nullopt);
  }
  return times;
}

}  // namespace

Result<Strategy> find_strategy(std::string_view name, const SweepOptions& options) {
  Strategy strategy{.name = std::string(name), .options = options};
  if (name == kUntuned) {
    strategy.measures = false;
  } else {
    F8_TRY(apply_strategy(name, strategy.options));
  }
  return strategy;
}

ExhaustiveSet exhaustive_set(const std::vector<MeasuredGemm>& gemms) {
  ExhaustiveSet set;
  std::vector<MeasuredGemm> whole;
  for (MeasuredGemm gemm : gemms) {
    std::erase_if(gemm.timed, [](const TimedConfig& timed) { return !timed.to_the_end; });
    const std::vector<GemmConfig> legal = codegen::gemm_candidates(gemm.family);
    const auto measured = std::ranges::count_if(legal, [&](const GemmConfig& config) {
      return std::ranges::find(gemm.timed, config, &TimedConfig::config) != gemm.timed.end();
    });
    if (static_cast<double>(measured) >= kExhaustiveShare * static_cast<double>(legal.size())) {
      whole.push_back(std::move(gemm));
    } else {
      ++set.left_out;
    }
  }
  for (const MeasuredGemm& gemm : whole) set.gemms.push_back({gemm, winners_near(gemm, whole)});
  return set;
}

Result<ReplayedSearch> replay(const ExhaustiveGemm& gemm, const Strategy& strategy, uint64_t seed) {
  const Problem problem = F8_TRY(Problem::parse(gemm.measured.problem));
  const StoredTimes times = stored_times(gemm.measured);
  double best_ns = times.begin()->second.ns;
  for (const auto& [key, stored] : times) best_ns = std::min(best_ns, stored.ns);
  const auto prior = prior_of(gemm);
  if (!strategy.measures) {
    return ReplayedSearch{
        .regret = times.at(candidate_key(to_candidate(prior.front()))).ns / best_ns - 1};
  }
  SweepOptions options = strategy.options;
  options.warm_s = 0;  // a sweep's GEMMs follow each other, so that the device is warm
  const auto candidates = candidates_of(gemm, options, prior, times);
  ReplayBackend backend(times, device_of(gemm.measured), seed);
  Measurer measurer(backend);
  std::vector<Candidate> finalists = candidates;
  if (is_screened(candidates.size(), options)) {
    finalists.clear();
    const auto screened_ns = F8_TRY(
        times_of(measurer, screening_group(problem, options, candidates.size(), seed), candidates));
    std::vector<ScreenedCandidate> screened;
    for (size_t i = 0; i < candidates.size(); ++i) {
      screened.push_back({candidates[i], screened_ns[i]});
    }
    for (const size_t i : choose_finalists(screened, prior, options, 0)) {
      finalists.push_back(candidates[i]);
    }
  }
  Candidate chosen = finalists.front();  // of a race: the fastest
  if (!options.race) {
    const auto final_ns = F8_TRY(
        times_of(measurer, final_group(problem, options, finalists.size(), seed + 1), finalists));
    const auto fastest = std::ranges::min_element(
        final_ns, [](const auto& a, const auto& b) { return a && (!b || *a < *b); });
    chosen = finalists[static_cast<size_t>(fastest - final_ns.begin())];
  }
  return ReplayedSearch{.regret = times.at(candidate_key(chosen)).ns / best_ns - 1,
                        .gpu_s = backend.now_s(),
                        .candidates = static_cast<int>(candidates.size())};
}

}  // namespace f8::tuner
