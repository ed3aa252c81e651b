// The rule of torchao's form (layers with n <= n_max and k <= k_max stay bf16) that agrees with
// most measured shapes, for each token count that was measured.
#include <algorithm>
#include <map>
#include <set>

#include "tuning_db/estimate/filter.hpp"

namespace f8::tuning_db {
namespace {

struct Measured {
  int64_t n = 0, k = 0;
  bool convert = false;
};

int64_t agreement(const std::vector<Measured>& trials, int64_t k_max, int64_t n_max) {
  return std::ranges::count_if(
      trials, [=](const Measured& c) { return c.convert == !(c.n <= n_max && c.k <= k_max); });
}

Threshold best_rule(int64_t m, const std::vector<Measured>& trials, const Recipe& recipe) {
  std::set<int64_t> ks, ns;
  for (const Measured& c : trials) {
    ks.insert(c.k);
    ns.insert(c.n);
  }
  Threshold best{.m = m,
                 .agree = agreement(trials, 0, 0),
                 .trials = static_cast<int64_t>(trials.size()),
                 .torchao_agree = 0};
  // Ascending, and only a better one replaces: of equal rules the one that keeps least.
  for (const int64_t k_max : ks) {
    for (const int64_t n_max : ns) {
      const int64_t agree = agreement(trials, k_max, n_max);
      if (agree <= best.agree) continue;
      best.k_max = k_max;
      best.n_max = n_max;
      best.agree = agree;
    }
  }
  best.kept = std::ranges::count_if(
      trials, [&best](const Measured& c) { return c.n <= best.n_max && c.k <= best.k_max; });
  best.torchao_agree = std::ranges::count_if(trials, [&recipe](const Measured& c) {
    return c.convert == torchao_verdict(recipe, {"", c.k, c.n}).convert;
  });
  return best;
}

}  // namespace

std::vector<Threshold> thresholds(const Estimator& estimator, double margin) {
  std::vector<Threshold> rules;
  if (estimator.empty()) return rules;
  std::map<int64_t, std::vector<Measured>> by_m;
  for (const LinearSpeedup& row : estimator.first().points()) {
    by_m[row.shape.m].push_back({row.shape.n, row.shape.k, row.lo > 1 + margin});
  }
  for (const auto& [m, trials] : by_m) rules.push_back(best_rule(m, trials, estimator.recipe()));
  return rules;
}

}  // namespace f8::tuning_db
