// The linears of a model under one recipe: which of them are converted to fp8, why or why not, and
// the plans of those that are, with their kernels compiled side by side beforehand.
//
// A layer is asked, in this order, and the first refusal keeps it in high precision:
//   1. names     part of its name is among the filter's
//   2. sizes     K and N are multiples of 16, also on ranks that share the layer, which have whole
//                blocks of it
//   3. callback  where there is one
//   4. verdicts  of a filter file, where there is one: what the automatic rule said elsewhere
//   5. automatic rule, if the names hold the flag that switches it on and there is no filter file:
//        torchao    torchao's fixed limits on K and N
//        measured   the tuning table's speedup of this recipe at this shape and token count, as
//                   tuning_db/estimate/filter.hpp has it
// A layer that nothing refused is converted if there is neither the flag nor a filter file. The
// speedup of a layer is an estimate whatever decides.
//
// The experts of a layer are a ModelLinear with groups. They have a verdict, and no plan: the caller
// plans them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "recipes/model/filter_file.hpp"
#include "recipes/model/filter_rule.hpp"
#include "runtime/linear/linear.hpp"
#include "tuning_db/estimate/estimator.hpp"
#include "tuning_db/estimate/wire_cost.hpp"

namespace f8::runtime {

struct ModelLinear {
  std::string name;          // once in a model
  int64_t in_features = 0;   // K
  int64_t out_features = 0;  // N
  // The rest that a plan asks for; its shape and recipe are the model's to say and left empty.
  LinearDesc desc = {};
  int64_t tokens = 0;     // M where it has its own, as an expert does; 0: the model's
  std::string kept = {};  // NamedLinear's, of a rank's part
  Groups groups = {};     // NamedLinear's; `tokens` are then the rows of all experts
};

struct ModelFilter {
  std::vector<std::string> names;  // filter_fqns; kAutoFlag among them: see above
  FilterPolicy policy = FilterPolicy::kMeasured;
  double margin = kFilterMargin;
  std::function<bool(const ModelLinear&)> callback;  // false: keep
  // The file is for this recipe and token count and has every layer that the names and sizes leave.
  std::optional<FilterFile> verdicts;
};

struct ModelOptions {
  Recipe recipe;
  int64_t tokens = 0;  // M: what the automatic rule asks for, and the largest M of a call
  ModelFilter filter = {};
  int compile_threads = 0;  // 0: all cores
  // The ranks that share the model. Its layers are given whole; with tensor parallelism verdicts
  // and plans are of one rank's part.
  tuning_db::Parallelism parallel = {};
  bool fused_mlps = false;  // as in tuning_db::FilterOptions
  std::string device = {};  // whose rows alone count, by a part of its name; empty: those of all
};

struct ConvertedLinear {
  std::string name;
  bool convert = false;
  std::string reason;  // one line
  Evidence evidence = Evidence::kRule;
  SpeedupInterval speedup = {};  // of forward and backward; 1 where nothing is known
  std::string measured_on = {};  // the device whose rows it is of; empty: unknown
  std::optional<tuning_db::WireShare> wire = {};  // where ranks share the model
  std::shared_ptr<const Linear> plan;  // null: kept, or experts. Layers that are alike share one
  size_t first_slot = 0;               // of its delayed scales among the model's
};

struct ModelPlan {
  std::vector<ConvertedLinear> linears;  // in the order they were given
  std::string device;                    // the one that the verdicts are for
  size_t converted = 0;
  size_t distinct_plans = 0;
  size_t kernels = 0;              // different ones that were compiled or taken from the cache
  std::vector<DelayedSlot> slots;  // of all converted linears, end to end: for DelayedScales
  size_t workspace_bytes = 0;      // the largest of the plans: calls in turn may share one
};

// The verdicts alone: no kernel is compiled. kInvalidArgument names the layer or the option. here:
// the machine that is asked about; null: the device that the table asks first.
[[nodiscard]] Result<std::vector<ConvertedLinear>> filter_model(
    std::span<const ModelLinear> linears, const ModelOptions& options, const TuningTable* table,
    const tuning_db::Machine* here = nullptr);

// An error of a plan names the layer.
[[nodiscard]] Result<ModelPlan> plan_model(const std::shared_ptr<Context>& context,
                                           std::span<const ModelLinear> linears,
                                           const ModelOptions& options);

}  // namespace f8::runtime
