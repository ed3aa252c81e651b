// The baselines of linears and expert linears: their GEMMs in bf16, as launches on every operand set.
#include <algorithm>
#include <utility>

#include "tools/tuner/backend/gpu/gpu_backend.hpp"

namespace f8::tuner {

// The grouped GEMMs among the choices for expert linears in bf16, by operand set.
Status GpuBackend::add_grouped_bf16(const Problem& linear, std::span<const LinearSet> sets,
                                    const LinearChoices& choices,
                                    std::vector<GemmLaunches>& launches) {
  runtime::ExpertsDesc desc = F8_TRY(experts_desc(linear));
  desc.recipe = bf16_recipe();
  for (size_t i = 0; i < choices.size(); ++i) {
    if (choices[i].provider == Provider::kGenerated) desc.configs[i] = choices[i].config;
  }
  const auto experts = F8_TRY(runtime::Experts::plan(context_, desc));
  F8_TRY(reserve_workspace(experts->workspace_bytes()));
  auto [forward, backward] = experts_calls(sets, {});
  for (size_t set = 0; set < sets.size(); ++set) {
    forward[set].workspace.data = backward[set].workspace.data =
        mutable_pointer(workspaces_.back().address());
    for (runtime::Step& step : steps_of(*experts, forward[set], backward[set])) {
      for (const Gemm gemm : kGemms) {
        const auto i = static_cast<size_t>(gemm);
        if (choices[i].provider != Provider::kGenerated ||
            step.name != f8::format("gemm {}", to_string(gemm))) {
          continue;
        }
        launches[set][i] = [experts, launch = std::move(step.launch)](runtime::Stream stream) {
          return launch(stream);
        };
      }
    }
  }
  return {};
}

// The GEMMs of a linear in bf16, by operand set: of experts, grouped ones, which follow the layout of the
// routing, or those of each group that has rows, one after the other. Where a group has none, its gradient
// becomes zero. Of a GEMM alone the other two are empty.
Result<std::vector<GpuBackend::GemmLaunches>> GpuBackend::bf16_launches(
    const Problem& linear, std::span<const LinearSet> sets, const LinearChoices& choices) {
  const auto [m, n, k] = linear.shape();
  std::vector<GemmLaunches> launches(sets.size());
  const bool whole_experts = is_grouped(linear.op) && !is_gemm(linear.op);
  if (whole_experts) F8_TRY(add_grouped_bf16(linear, sets, choices, launches));
  std::map<std::pair<Gemm, int64_t>, runtime::GemmPlanPtr> plans;  // by rows
  size_t workspace_bytes = 0;
  const auto plan_of = [&](Gemm gemm, int64_t rows) -> Result<runtime::GemmPlanPtr> {
    runtime::GemmPlanPtr& plan = plans[{gemm, rows}];
    if (plan != nullptr) return plan;
    Problem problem = linear;
    problem.op = to_op(gemm);
    problem.dims = Shape{rows, n, k};
    const runtime::GemmDesc desc = F8_TRY(gemm_desc(problem, true));
    const runtime::GemmChoice choice = is_grouped(linear.op)
                                           ? F8_TRY(runtime::GemmPlan::choose(*context_, desc))
                                           : choices[static_cast<size_t>(gemm)];
    plan = F8_TRY(runtime::GemmPlan::create(context_, desc, choice));
    workspace_bytes = std::max(workspace_bytes, plan->workspace_bytes());
    return plan;
  };
  struct One {
    runtime::GemmPlanPtr plan;
    int64_t first, rows;  // of the group
    int64_t weight;       // the first row of its matrix
  };
  std::array<std::vector<One>, 3> all;
  for (const Gemm gemm : kGemms) {
    if (is_gemm(linear.op) && to_gemm(linear.op) != gemm) continue;
    const auto i = static_cast<size_t>(gemm);
    if (whole_experts && choices[i].provider == Provider::kGenerated) continue;
    int64_t first = 0;
    for (size_t e = 0; e < group_rows_.size(); first += group_rows_[e++]) {
      const int64_t rows = group_rows_[e];
      if (rows == 0 && gemm != Gemm::kGradWeight) continue;
      const int64_t planned = rows > 0 ? rows : std::ranges::max(group_rows_);
      all[i].push_back({F8_TRY(plan_of(gemm, planned)), first, rows, static_cast<int64_t>(e) * n});
    }
  }
  F8_TRY(reserve_workspace(workspace_bytes));
  void* workspace = mutable_pointer(workspaces_.back().address());
  const auto row = [](auto at, int64_t first, int64_t cols) {
    return at + bytes_of(first * cols, Dtype::kBf16);
  };
  for (size_t at = 0; at < sets.size(); ++at) {
    const LinearSet& set = sets[at];
    const auto* x = static_cast<const uint8_t*>(set.x.data);
    const auto* w = static_cast<const uint8_t*>(set.w.data);
    const auto* dy = static_cast<const uint8_t*>(set.dy.data);
    for (const Gemm gemm : kGemms) {
      const auto i = static_cast<size_t>(gemm);
      if (all[i].empty()) continue;
      std::vector<runtime::GemmCall> calls;
      for (const One& one : all[i]) {
        runtime::GemmCall call{.inv_scale_a = nullptr, .inv_scale_b = nullptr, .m = one.rows};
        call.a = gemm == Gemm::kOutput ? row(x, one.first, k) : row(dy, one.first, n);
        call.b = gemm == Gemm::kGradWeight ? row(x, one.first, k) : row(w, one.weight, k);
        call.d = mutable_pointer(gemm == Gemm::kOutput      ? row(set.y, one.first, n)
                                 : gemm == Gemm::kGradInput ? row(set.dx, one.first, k)
                                                            : row(set.dw, one.weight, k));
        calls.push_back(call);
      }
      launches[at][i] = [plans = all[i], calls = std::move(calls),
                         workspace](runtime::Stream stream) -> Status {
        for (size_t c = 0; c < plans.size(); ++c) {
          F8_TRY(plans[c].plan->run(calls[c], workspace, stream));
        }
        return {};
      };
    }
  }
  return launches;
}

// The baseline, with the layout that grouped GEMMs read.
Result<Built> GpuBackend::add_bf16(const Candidate& candidate) {
  LinearChoices choices;
  for (auto& choice : choices) choice.provider = Provider::kCublasLt;
  if (!candidate.config.empty() && !is_gemm(problem_.op)) {
    choices = F8_TRY(parse_choices(candidate.config));
  }
  const bool lays_out =
      is_grouped(problem_.op) && !is_gemm(problem_.op) &&
      std::ranges::count(choices, Provider::kGenerated, &runtime::GemmChoice::provider) > 0;
  Timed timed;
  timed.candidate = candidate;
  for (GemmLaunches& gemms : F8_TRY(bf16_launches(problem_, linear_sets_, choices))) {
    timed.launch.emplace_back(
        [this, lays_out, gemms = std::move(gemms)](runtime::Stream stream) -> Status {
          if (lays_out) F8_TRY(routing_->plan.run(routing_->call, stream));
          for (const Launch& gemm : gemms) {
            if (gemm) F8_TRY(gemm(stream));
          }
          return {};
        });
  }
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

}  // namespace f8::tuner
