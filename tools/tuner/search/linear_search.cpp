#include "tools/tuner/search/linear_search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

namespace f8::tuner {
namespace {

using tuning_db::TrialResult;

constexpr double kDropAbove = 1.06;  // a linear this much slower is not timed to the end
constexpr double kClearly =
    0.997;                      // this share of another linear's time is faster by more than noise
constexpr size_t kDeepest = 3;  // how many kernels of a GEMM linears are made of
constexpr size_t kFewest = 2;   // linears of the second rung

// The configurations under which both gradients together are fastest, as the sum of two launches.
std::vector<runtime::GemmChoice> shared_by_gradients(const KernelShortlists& shortlists) {
  constexpr size_t kMost = 2;
  const auto& grad_input = shortlists[static_cast<size_t>(Gemm::kGradInput)].timed;
  const auto& grad_weight = shortlists[static_cast<size_t>(Gemm::kGradWeight)].timed;
  std::vector<TimedKernel> shared;
  for (const TimedKernel& one : grad_input) {
    if (one.choice.provider != Provider::kGenerated) continue;
    const auto same = std::ranges::find_if(grad_weight, [&](const TimedKernel& other) {
      return other.choice.provider == Provider::kGenerated &&
             other.choice.config == one.choice.config;
    });
    if (same != grad_weight.end()) shared.push_back({one.choice, one.ns + same->ns});
  }
  std::ranges::stable_sort(shared, {}, &TimedKernel::ns);
  std::vector<runtime::GemmChoice> choices;
  for (size_t i = 0; i < std::min(kMost, shared.size()); ++i) choices.push_back(shared[i].choice);
  return choices;
}

// A combination of the best changes of the first rung: a GEMM takes another kernel than its fastest
// where that change alone made the linear faster.
LinearChoices join(const std::vector<LinearChoices>& variants,
                   const std::vector<std::optional<double>>& ns) {
  LinearChoices joined = variants.front();
  if (!ns.front()) return joined;
  std::array<double, 3> best;
  best.fill(kClearly * *ns.front());
  for (size_t v = 1; v < variants.size(); ++v) {
    std::vector<size_t> changed;
    for (size_t i = 0; i < joined.size(); ++i) {
      if (config_text(variants[v][i]) != config_text(variants.front()[i]) ||
          variants[v][i].provider != variants.front()[i].provider) {
        changed.push_back(i);
      }
    }
    if (changed.size() != 1 || !ns[v] || *ns[v] >= best[changed.front()]) continue;
    best[changed.front()] = *ns[v];
    joined[changed.front()] = variants[v][changed.front()];
  }
  return joined;
}

// The linear of the p-th prior choices, or the last where a GEMM has fewer; a GEMM without any takes
// its fastest kernel.
LinearChoices prior_linear(const KernelShortlists& shortlists, size_t p) {
  LinearChoices choices;
  for (size_t i = 0; i < shortlists.size(); ++i) {
    const auto& prior = shortlists[i].prior;
    choices[i] =
        prior.empty() ? shortlists[i].timed.front().choice : prior[std::min(p, prior.size() - 1)];
  }
  return choices;
}

// The times of linears by their text. A linear of a later rung has its time there.
class LinearTimes {
 public:
  void add(const LinearChoices& choices, const std::optional<double>& ns, int rung) {
    if (ns) times_[choices_text(choices)][static_cast<size_t>(rung)] = ns;
  }
  // How much longer `slower` takes than `best`, from the last rung that has both; where none has,
  // from the last that each has.
  [[nodiscard]] std::optional<double> over(const LinearChoices& slower,
                                           const LinearChoices& best) const {
    const auto a = times_.find(choices_text(slower));
    const auto b = times_.find(choices_text(best));
    if (a == times_.end() || b == times_.end()) return std::nullopt;
    for (size_t rung = kRungs; rung-- > 0;) {
      if (a->second[rung] && b->second[rung]) return *a->second[rung] / *b->second[rung];
    }
    return last(a->second) / last(b->second);
  }

 private:
  static constexpr size_t kRungs = 2;
  using Rungs = std::array<std::optional<double>, kRungs>;
  static double last(const Rungs& rungs) { return rungs[1] ? *rungs[1] : *rungs[0]; }
  std::map<std::string, Rungs> times_;
};

}  // namespace

std::vector<LinearChoices> linear_variants(const KernelShortlists& shortlists,
                                           const LinearSearchOptions& options) {
  std::vector<LinearChoices> variants;
  std::vector<std::string> seen;
  const auto add = [&](const LinearChoices& choices) {
    std::string text = choices_text(choices);
    if (static_cast<int>(variants.size()) >= std::max(1, options.most) ||
        std::ranges::find(seen, text) != seen.end()) {
      return;
    }
    seen.push_back(std::move(text));
    variants.push_back(choices);
  };
  LinearChoices fastest;
  size_t priors = 0;
  for (size_t i = 0; i < shortlists.size(); ++i) {
    fastest[i] = shortlists[i].timed.front().choice;
    priors = std::max(priors, shortlists[i].prior.size());
  }
  add(fastest);
  for (size_t p = 0; p < priors; ++p) add(prior_linear(shortlists, p));
  for (const runtime::GemmChoice& shared : shared_by_gradients(shortlists)) {
    LinearChoices together = fastest;
    together[static_cast<size_t>(Gemm::kGradInput)] = shared;
    together[static_cast<size_t>(Gemm::kGradWeight)] = shared;
    add(together);
  }
  for (size_t depth = 1; depth < kDeepest; ++depth) {
    for (size_t i = 0; i < shortlists.size(); ++i) {
      const std::vector<TimedKernel>& timed = shortlists[i].timed;
      if (depth >= timed.size() || timed[depth].ns > timed.front().ns * options.within) continue;
      LinearChoices swapped = fastest;
      swapped[i] = timed[depth].choice;
      add(swapped);
    }
  }
  return variants;
}

Result<LinearSearch> search_linear(InterleavedGroup group, const KernelShortlists& shortlists,
                                   const LinearSearchOptions& options, const MeasureGroup& measure,
                                   Impl impl) {
  std::vector<LinearChoices> variants = linear_variants(shortlists, options);
  LinearSearch found{.choices = variants.front()};
  if (variants.size() == 1) return found;

  const auto time = [&](const std::vector<LinearChoices>& linears,
                        double share_ms) -> Result<std::vector<std::optional<double>>> {
    group.candidates.clear();
    for (const LinearChoices& choices : linears) {
      group.candidates.push_back({.impl = impl, .config = choices_text(choices)});
    }
    const double all_s = share_ms / 1e3 * static_cast<double>(linears.size());
    group.stop = {.target = kAnyWidth, .min_s = all_s, .max_s = all_s, .min_blocks = 2};
    group.purpose = Screening{.drop_above = kDropAbove};
    ++group.seed;
    std::vector<std::optional<double>> ns;
    for (const TrialResult& result : F8_TRY(measure(group))) {
      ns.push_back(result.timing ? std::optional(result.timing->median_ns) : std::nullopt);
    }
    return ns;
  };
  const std::vector<std::optional<double>> first = F8_TRY(time(variants, options.ms));
  std::vector<size_t> ranked;
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i]) ranked.push_back(i);
  }
  found.timed = static_cast<int>(ranked.size());
  if (ranked.empty()) return found;
  std::ranges::stable_sort(ranked, {}, [&](size_t i) { return *first[i]; });

  std::vector<LinearChoices> finalists;
  const size_t keep = std::max(kFewest, (ranked.size() + 2) / 3);
  for (size_t i = 0; i < std::min(keep, ranked.size()); ++i) {
    finalists.push_back(variants[ranked[i]]);
  }
  const LinearChoices joined = join(variants, first);
  const auto is_joined = [text = choices_text(joined)](const LinearChoices& choices) {
    return choices_text(choices) == text;
  };
  if (std::ranges::none_of(variants, is_joined)) {
    finalists.push_back(joined);
    ++found.timed;
  }
  LinearTimes times;
  for (size_t i = 0; i < variants.size(); ++i) times.add(variants[i], first[i], 0);
  found.choices = finalists.front();
  if (finalists.size() > 1) {
    const std::vector<std::optional<double>> second = F8_TRY(time(finalists, 2 * options.ms));
    for (size_t i = 0; i < finalists.size(); ++i) times.add(finalists[i], second[i], 1);
    const auto faster = [](const std::optional<double>& a, const std::optional<double>& b) {
      return a && (!b || *a < *b);
    };
    const auto best = std::ranges::min_element(second, faster);
    if (*best) found.choices = finalists[static_cast<size_t>(best - second.begin())];
  }
  found.over_first = times.over(variants.front(), found.choices).value_or(1);
  constexpr size_t kLast = std::numeric_limits<size_t>::max();
  found.over_untuned = times.over(prior_linear(shortlists, kLast), found.choices);
  return found;
}

}  // namespace f8::tuner
