#include "runtime/gemm/choose.hpp"

#include <algorithm>
#include <atomic>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "runtime/gemm/grouped_winners.hpp"
#include "runtime/gemm/provider.hpp"

namespace f8::runtime {
namespace {

std::atomic<uint64_t> choices_made = 0;

// The table keeps choices by the label of a recipe. Recipes whose operands of this GEMM have these
// scales have the same kernel, so that a row of any of them will do: those with the same mix of a
// tensor's and rows' scales come first. In high precision there are no scales, and any label will do.
std::vector<std::string_view> table_labels(const GemmDesc& desc) {
  std::vector<std::string_view> exact, alike;
  for (const Recipe& recipe : builtin_recipes()) {
    const GemmSetting& gemm = recipe.at(desc.gemm);
    const GemmScales scales = gemm_scales(gemm);
    if (is_fp8(desc.a) && (!gemm.is_fp8() || scales.mode != desc.scale)) continue;
    const bool same = gemm.is_fp8() == is_fp8(desc.a) && scales.scalar_a == desc.scalar_a &&
                      scales.scalar_b == desc.scalar_b;
    (same ? exact : alike).push_back(recipe.name);
  }
  exact.insert(exact.end(), alike.begin(), alike.end());
  return exact;
}

// cuBLASLt multiplies fp8 operands without a mix of a tensor's and rows' scales, and with biases of
// 16 bits alone; it leaves no amax.
bool library_can(const GemmDesc& desc) {
  return !is_fp8(desc.a) ||
         (!desc.scalar_a && !desc.scalar_b && !desc.amax && (!desc.bias || desc.d != Dtype::kF32));
}

Problem table_problem(const GemmDesc& desc) {
  Problem problem;
  problem.op = to_op(desc.gemm);
  problem.a = desc.a;
  problem.b = desc.b;
  problem.d = desc.d;
  problem.dims = desc.shape;
  problem.fast = desc.fast;
  return problem;
}

// Results of as many bytes take as long.
std::vector<Dtype> table_results(Dtype result) {
  if (result == Dtype::kF16) return {Dtype::kF16, Dtype::kBf16};
  return {result};
}

// Gives the row of exactly this GEMM under any of its recipes; null: the table has none that the
// provider can compute.
const KernelChoice* find_choice(const TuningTable& table, const GemmDesc& desc) {
  Problem problem = table_problem(desc);
  for (const Dtype result : table_results(desc.d)) {
    problem.d = result;
    for (const std::string_view label : table_labels(desc)) {
      problem.recipe = label;
      const KernelChoice* found = table.find(problem);
      const bool library = found != nullptr && found->kernel.provider == Provider::kCublasLt;
      if (found == nullptr || (library && !library_can(desc))) continue;
      if (is_fp8(desc.a) || library) return found;
    }
  }
  return nullptr;
}

// Generated kernels that won at the measured shapes nearest to this one.
std::vector<NearbyWinner> nearby_winners(const TuningTable& table, const GemmDesc& desc) {
  Problem problem = table_problem(desc);
  std::vector<NearbyWinner> winners;
  for (const Dtype result : table_results(desc.d)) {
    problem.d = result;
    for (const std::string_view label : table_labels(desc)) {
      problem.recipe = label;
      for (const auto& [choice, octaves] : table.neighbours(problem, 2 * kMostNearby)) {
        if (choice->kernel.provider != Provider::kGenerated) continue;
        winners.push_back({choice->kernel.config, octaves});
        if (winners.size() == kMostNearby) return winners;
      }
      if (!winners.empty()) return winners;
    }
  }
  return winners;
}

// The scales of a row's GEMM; all of them where its label does not tell the settings.
std::vector<Granularity> scale_modes(const Problem& problem) {
  using enum Granularity;
  const Result<Recipe> recipe = find_recipe(problem.recipe);
  if (!recipe) return {kTensor, kAxis, kBlock1x128, kBlock128x128};
  return {gemm_scales(recipe->at(to_gemm(problem.op))).mode};
}

Status check_choice(const KernelChoice& row) {
  if (row.kernel.provider != Provider::kGenerated) return {};
  const Problem& problem = row.problem;
  Status checked;
  for (const Granularity mode : scale_modes(problem)) {
    GemmDesc desc{.gemm = to_gemm(problem.op),
                  .shape = problem.shape(),
                  .a = problem.a,
                  .b = problem.b,
                  .d = problem.d,
                  .scale = mode,
                  .fast = problem.fast};
    codegen::GemmSpec spec = is_grouped(problem.op) ? grouped_spec(desc) : gemm_spec(desc, {});
    spec.config = row.kernel.config;
    checked = codegen::validate(spec);
    if (checked) return {};
  }
  return checked;
}

// The line of a problem's kernel in the text of a table, however its key is spelled there.
int line_of(const Problem& problem, std::string_view text) {
  for (int line = 1; !text.empty(); ++line) {
    std::string_view row = take_until(text, '\n');
    if (!take(row, "kernel ")) continue;
    const Result<Problem> own = Problem::parse(take_until(row, ' '));
    if (own && *own == problem) return line;
  }
  return 0;
}

}  // namespace

Result<TuningTable> parse_table(std::string_view text) {
  TuningTable table = F8_TRY(TuningTable::parse(text));
  for (const KernelChoice& row : table.choices()) {
    const Status good = check_choice(row);
    if (good) continue;
    return fail(ErrorCode::kCorrupt, "tuning table, line {}: {}", line_of(row.problem, text),
                good.error().message);
  }
  return table;
}

codegen::GemmSpec grouped_spec(const GemmDesc& desc) {
  return desc.gemm == Gemm::kGradWeight ? k_grouped_spec(desc, {}) : m_grouped_spec(desc, {});
}

// A group's own shape, as a GEMM. The cost model counts in elements of a byte.
static Shape group_shape(const GroupedDesc& desc) {
  Shape linear = desc.gemm.shape;
  linear.m = std::max<int64_t>(linear.m / desc.layout.experts, 1);
  Shape own = gemm_shape(linear, desc.gemm.gemm);
  own.k *= static_cast<int64_t>(size_bytes(desc.gemm.a));
  return own;
}

// The tiles of all groups, each over its share of the rows.
Shape grouped_shape(const GroupedDesc& desc) {
  const Shape group = group_shape(desc);
  const bool of_rows = desc.gemm.gemm != Gemm::kGradWeight;
  return {of_rows ? desc.gemm.shape.m : desc.layout.experts * group.m, group.n, group.k};
}

Result<GemmChoice> choose_grouped(const TuningTable* table, const GroupedDesc& desc, int sm_count) {
  constexpr int64_t kNoSkew = -1;  // rows of every skew are neighbours of a problem with this one
  const codegen::GemmSpec spec = grouped_spec(desc.gemm);
  std::vector<NearbyWinner> nearby;
  Problem problem = table_problem(desc.gemm);
  problem.op = grouped(problem.op);
  problem.dims = {desc.layout.experts, desc.gemm.shape.m, desc.gemm.shape.n, desc.gemm.shape.k,
                  kNoSkew};
  if (desc.gemm.sm_limit > 0) table = nullptr;  // rows are measured with all SMs
  for (const Dtype result : table_results(desc.gemm.d)) {
    problem.d = result;
    for (const std::string_view label : table_labels(desc.gemm)) {
      if (table == nullptr) break;
      problem.recipe = label;
      for (const auto& [choice, octaves] : table->neighbours(problem, 2 * kMostNearby)) {
        if (choice->kernel.provider != Provider::kGenerated) continue;
        codegen::GemmSpec measured = spec;
        measured.config = choice->kernel.config;
        Dims dims = choice->problem.dims;
        dims.sizes[spec_of(problem.op).dims.size() - 1] = kNoSkew;
        // The row's kernel may have had other results, and no room for these.
        const auto fitting = codegen::with_fitting_stages(measured);
        if (dims == problem.dims && fitting) {
          GemmChoice found;
          found.config = *fitting;
          found.why = "the tuning table's row of this shape";
          return found;
        }
        if (nearby.size() < kMostNearby) nearby.push_back({choice->kernel.config, octaves});
      }
    }
  }
  GemmChoice choice;
  choice.neighbours = static_cast<int>(nearby.size());
  choice.why = nearby.empty() ? "by the cost model and the winners of known models"
                              : f8::format(
                                    "by the cost model and the {} nearest rows of the tuning "
                                    "table",
                                    nearby.size());
  for (const NearbyWinner& known : grouped_winners(spec, group_shape(desc))) {
    if (nearby.size() < kMostNearby) nearby.push_back(known);
  }
  choice.config = F8_TRY(cheapest_config(spec, grouped_shape(desc), usable_sms(desc.gemm, sm_count),
                                         nearby, desc.layout.experts));
  return choice;
}

uint64_t chosen_gemms() {
  return choices_made.load(std::memory_order_relaxed);
}

Result<GemmChoice> choose_gemm(const TuningTable* table, const GemmDesc& desc, int sm_count) {
  choices_made.fetch_add(1, std::memory_order_relaxed);
  F8_TRY(validate(desc));
  const char* without =
      table == nullptr ? "there is no tuning table" : "the tuning table has no row of this shape";
  if (desc.sm_limit > 0) {
    // Rows are measured with all SMs.
    without = "its SMs are limited";
    table = nullptr;
    sm_count = usable_sms(desc, sm_count);
  }
  if (table != nullptr) {
    if (const KernelChoice* found = find_choice(*table, desc)) {
      GemmChoice choice = {found->kernel};
      // cuBLASLt numbers its suggestions afresh for every type.
      const bool numbered = found->problem.d == desc.d;
      if (!numbered) choice.heuristic = unmeasured_suggestion(desc);
      choice.why = numbered || choice.provider == Provider::kGenerated
                       ? "the tuning table's row of this shape"
                       : "the tuning table's row of this shape and another type of result";
      if (choice.provider != Provider::kGenerated) return choice;
      // The row's kernel had no bias and no amax, which take room.
      const auto fitting = codegen::with_fitting_stages(gemm_spec(desc, choice.config));
      if (fitting) {
        choice.config = *fitting;
        return choice;
      }
      without = "the tuning table's configuration has no room for this epilogue";
    }
  }
  GemmChoice choice;
  if (!is_fp8(desc.a)) {
    choice.provider = Provider::kCublasLt;
    choice.heuristic = unmeasured_suggestion(desc);
    choice.why = f8::format("{}, and high precision is left to cuBLASLt's suggestion {}", without,
                            choice.heuristic == 0 ? "h0" : "that is ranked first");
    return choice;
  }
  std::vector<NearbyWinner> nearby;
  if (table != nullptr) nearby = nearby_winners(*table, desc);
  choice.neighbours = static_cast<int>(nearby.size());
  choice.why = nearby.empty()
                   ? f8::format("by the cost model: {}", without)
                   : f8::format("by the cost model and the {} nearest rows of the tuning table: {}",
                                nearby.size(), without);
  const Shape own = gemm_shape(desc.shape, desc.gemm);
  choice.config = F8_TRY(cheapest_config(gemm_spec(desc, {}), own, sm_count, nearby));
  if (desc.sm_limit > 0 || !library_can(desc)) return choice;
  const codegen::GemmSpec spec = gemm_spec(desc, choice.config);
  if (prefers_library(spec, own, sm_count, voted_clocks(spec, own, sm_count, nearby))) {
    choice.provider = Provider::kCublasLt;
    choice.otherwise = std::exchange(choice.config, {});
    choice.why += "; cuBLASLt's first suggestion is expected to be no slower";
  }
  return choice;
}

}  // namespace f8::runtime
