// The auto filter: which linears of a model to convert, and why. float8-tune and the runtime both
// ask here, so equal questions have equal answers.
//
// A layer is asked, in this order, and the first refusal keeps it in bf16:
//   names   an entry of filter_fqns is part of its name
//   sizes   K and N are multiples of 16, also on each of the ranks that share it
//   ranks   where they share it and the recipe has blocks, each has whole ones
//   rule    where the automatic rule is on
//             measured   the lower end of the speedup exceeds 1 + margin: the row of exactly this
//                        shape and token count; else interpolation in log2(m), log2(n), log2(k)
//                        between measured shapes that surround it; else a model fitted to the rows
//             torchao    torchao's fixed limits of N and K
// A layer that nothing refused is converted. The estimated speedup of every layer comes from the
// measurements, whatever decides. Where ranks share the model, what they send is in it
// (wire_cost.hpp), and it is `modelled`.
//
// The experts of a layer have one verdict. It is that of rows of MLPs of such experts, since an MLP is what runs, unless
// rows of their two expert linears are stronger evidence. Then the times of these are added, in bf16 and in fp8, and
// the ends of their intervals likewise, and it rests on the weaker evidence of both.
// With `fused_mlps` the linears of an MLP have one verdict too, by rows of MLPs on the same condition; else, where
// their own verdicts are not the same, by their times together. A recipe with a GEMM in high precision is not fused.
// What ranks send for experts has as many bytes in fp8 as in bf16, and is left out.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "recipes/mlp.hpp"
#include "recipes/model/filter_rule.hpp"
#include "recipes/recipe.hpp"
#include "tuning_db/estimate/estimator.hpp"
#include "tuning_db/estimate/wire_cost.hpp"

namespace f8::tuning_db {

struct FilterOptions {
  FilterPolicy policy = FilterPolicy::kMeasured;
  int64_t tokens = 0;
  std::vector<std::string> filter_fqns{};  // kAutoFlag among them switches the automatic rule on
  double margin = kFilterMargin;
  bool automatic = false;  // the rule is on without kAutoFlag too
  Parallelism parallel{};  // of the ranks that share the model
  WireModel wire = WireModel::fitted();
  // MLPs of converted linears run as one (float8.torch.fuse), but for recipes that it leaves.
  bool fused_mlps = false;
};

// One of the two expert linears that a verdict on experts adds up.
struct ExpertPart {
  ExpertLinear linear;
  Evidence evidence = Evidence::kRule;
  SpeedupInterval speedup{};
  double bf16_ns = 0;
};

struct FilterDecision {
  NamedLinear layer;
  bool convert = false;
  std::string reason{};                 // one line
  Evidence evidence = Evidence::kRule;  // what the verdict rests on
  // Forward and backward together, if it is converted; 1 where nothing is known.
  double speedup = 1, lo = 1, hi = 1;
  IntervalTerms terms{};  // of the interval without the wire; zeros where nothing is known
  double bf16_ns = 0;     // with what is exposed of the wire; 0: unknown
  std::string device{};   // whose rows the speedup is of
  std::vector<std::string> trial_uuids{};
  std::optional<WireShare> wire{};  // where ranks share the model and the speedup is known
  std::vector<ExpertPart> parts{};  // of experts whose speedup is that of their expert linears
  // Something is known of its speedup, which with the wire may be 1 exactly.
  [[nodiscard]] bool has_estimate() const {
    return wire || SpeedupInterval{speedup, lo, hi} != SpeedupInterval{};
  }
};

// The MLPs that will be fused, of which no linear is kept by its name or its sizes.
struct MlpCounts {
  size_t all = 0;
  size_t as_wholes = 0;  // rows of MLPs decide about them
};

struct FilterResult {
  std::string device;
  std::vector<FilterDecision> decisions;
  double estimated_model_speedup = 1;  // all these linears together, weighted by their bf16 time
  MlpCounts mlps{};
  std::optional<WireCost> wire{};  // where ranks share the model
};

// layers: with the shapes of one tensor-parallel rank (recipes/model/tensor_parallel.hpp).
// kInvalidArgument names the layer or the option. The recipe is the estimator's.
[[nodiscard]] Result<FilterResult> filter(std::span<const NamedLinear> layers,
                                          const FilterOptions& options, const Estimator& estimator);

// How to measure shapes of linears, or of expert linears: the end of a sentence.
[[nodiscard]] std::string how_to_measure(const Recipe& recipe, std::span<const Shape> shapes,
                                         const Groups& groups);
[[nodiscard]] std::string how_to_measure(const Recipe& recipe, const MlpShape& mlp);
// The thresholds that the measurements imply for a token count: layers with n <= n_max and
// k <= k_max stay bf16.
struct Threshold {
  int64_t m = 0;
  int64_t k_max = 0, n_max = 0;   // 0: every measured shape is worth converting
  int64_t kept = 0;               // measured shapes that it keeps
  int64_t agree = 0, trials = 0;  // measured trials on which this rule and the measurement agree
  int64_t torchao_agree = 0;      // where torchao has no rule for the recipe: of converting all
};
[[nodiscard]] std::vector<Threshold> thresholds(const Estimator& estimator,
                                                double margin = kFilterMargin);

}  // namespace f8::tuning_db
