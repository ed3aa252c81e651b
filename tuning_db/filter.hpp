// The auto filter: which linears of a model to convert, and why.
//
// Policy `measured` answers for a token count from the linears of the databases (user's first, then
// the built-in): the row of exactly this shape; else interpolation in log2(m), log2(n), log2(k)
// between measured shapes that surround it; else a model fitted to the rows. It converts where the
// lower bound of the speedup exceeds 1 + margin. Policy `torchao` is the peer's fixed rule,
// exactly.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "recipes/filter_rule.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuning_db {

struct FilterOptions {
  FilterPolicy policy = FilterPolicy::kMeasured;
  int64_t tokens = 0;
  std::vector<std::string>
      filter_fqns{};  // as given; kAutoFlag among them switches the automatic rule on
  double margin = kFilterMargin;
  std::string device{};  // only rows of the device of this name; empty: the device measured last,
                         // and others (as `modelled`) where it has no answer
};

struct FilterDecision {
  NamedLinear layer;
  bool convert = false;
  std::string reason;
  Evidence evidence = Evidence::kRule;
  double speedup = 1, lo = 1,
         hi = 1;  // of forward + backward if converted; 1 where nothing is known
  std::vector<std::string> trial_uuids;
};

struct FilterResult {
  std::string device;
  std::vector<FilterDecision> decisions;
  double estimated_model_speedup = 1;  // of all these linears together, weighted by their bf16 time
};

// The rules of the names and of the multiple of 16 apply under both policies. Under `torchao` the
// automatic rule needs kAutoFlag among the names, as the peer has it; `measured` always decides
// automatically.
[[nodiscard]] Result<FilterResult> filter(std::span<const NamedLinear> layers, const Recipe& recipe,
                                          const FilterOptions& options,
                                          std::span<const Database* const> dbs);

// The thresholds that the database implies for a token count: layers with n <= n_max and k <= k_max
// stay bf16.
struct Threshold {
  int64_t m = 0;
  int64_t k_max = 0, n_max = 0;  // 0: every measured shape is worth converting
  int64_t agree = 0, cells = 0;  // measured cells on which this rule and the measurement agree
  int64_t torchao_agree = 0;     // where the peer has no rule for the recipe: of converting all
};
[[nodiscard]] Result<std::vector<Threshold>> thresholds(const Recipe& recipe,
                                                        std::span<const Database* const> dbs,
                                                        double margin = kFilterMargin);

}  // namespace f8::tuning_db
