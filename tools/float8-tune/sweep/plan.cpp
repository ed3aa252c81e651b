// plan: says what a sweep of these shapes would measure, what its model rules out and why, what the
// databases hold already, and how long it would take. It launches nothing and needs no GPU.
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/sweep/sweep_job.hpp"
#include "tools/float8-tune/trial_json.hpp"
#include "tools/tuner/search/plan/sweep_plan.hpp"

namespace f8::cli {
namespace {

struct PlanOptions {
  SweepArgs args;
  bool candidates = false;
};

struct Cached {
  int64_t ok = 0, other = 0;
  std::optional<tuning_db::TrialRow> linear;  // the best float8 row
};

Result<Cached> cached(const Databases& databases, const tuner::PlannedLinear& linear,
                      const DeviceClass& device) {
  Cached found;
  std::vector<Problem> problems = {linear.problem};
  for (const tuner::PlannedGemm& gemm : linear.gemms) problems.push_back(gemm.problem);
  for (const tuning_db::Database* db : databases.pointers()) {
    for (const Problem& problem : problems) {
      for (const tuning_db::TrialRow& row : F8_TRY(db->trials(problem))) {
        if (!row.device.is_same_class(device)) continue;
        const bool ok = row.result.state == tuning_db::TrialState::kOk && row.fidelity == "final";
        ++(ok ? found.ok : found.other);
        if (ok && !found.linear && row.candidate.impl == tuning_db::Impl::kFloat8) {
          found.linear = row;
        }
      }
    }
  }
  return found;
}

Json gemm_json(const tuner::PlannedGemm& gemm, bool candidates) {
  int64_t measured = 0;
  int64_t pruned = 0;
  for (const tuner::Generated& g : gemm.generated) ++(g.pruned.empty() ? measured : pruned);
  Json json = {{"problem", gemm.problem.key()},
               {"generated", measured},
               {"pruned", pruned},
               {"cublaslt", gemm.fp8_suggestions.size()},
               {"bf16_cublaslt", gemm.bf16_suggestions.size()}};
  if (!candidates) return json;
  Json rows = Json::array();
  for (const tuner::Generated& g : gemm.generated) {
    Json row = {{"config", key(g.spec.config)}, {"predicted_us", rounded(g.predicted_ns / 1e3)}};
    if (!g.pruned.empty()) row["pruned"] = g.pruned;
    rows.push_back(row);
  }
  json["candidates"] = rows;
  return json;
}

Json attention_json(const tuner::PlannedLinear& part, const Cached& known) {
  Json row = problem_json(part.problem);
  row["predicted_s"] = rounded(part.predicted_s, 3);
  row["cached_ok"] = known.ok;
  row["cached_other"] = known.other;
  return row;
}

Json linear_json(const tuner::PlannedLinear& linear, const Cached& known, bool candidates) {
  const Shape s = linear.problem.shape();
  Json gemms = Json::array();
  for (const tuner::PlannedGemm& gemm : linear.gemms) gemms.push_back(gemm_json(gemm, candidates));
  Json row = {{"problem", linear.problem.key()},
              {"m", s.m},
              {"n", s.n},
              {"k", s.k},
              {"recipe", linear.problem.recipe},
              {"predicted_s", rounded(linear.predicted_s, 3)},
              {"cached_ok", known.ok},
              {"cached_other", known.other},
              {"gemms", gemms}};
  add_groups(row, linear.problem);
  if (known.linear && known.linear->result.ratio) {
    row["cached_speedup"] = rounded(known.linear->result.ratio->ratio, 4);
  }
  return row;
}

void add_row(Table& table, const tuner::PlannedLinear& linear, const Cached& known) {
  int64_t generated = 0;
  int64_t pruned = 0;
  int64_t library = 0;
  for (const tuner::PlannedGemm& gemm : linear.gemms) {
    for (const tuner::Generated& g : gemm.generated) ++(g.pruned.empty() ? generated : pruned);
    library += std::ssize(gemm.fp8_suggestions) + std::ssize(gemm.bf16_suggestions);
  }
  table.add({mnk_of(linear.problem), linear.problem.recipe, std::to_string(generated),
             std::to_string(pruned), std::to_string(library), std::to_string(known.ok),
             f8::format("{:.1f} s", linear.predicted_s)});
}

void print_candidates(const tuner::SweepPlan& plan) {
  for (const tuner::PlannedLinear& linear : plan.linears) {
    for (const tuner::PlannedGemm& gemm : linear.gemms) {
      print(f8::format("\n{}\n", gemm.problem.key()));
      for (const tuner::Generated& g : gemm.generated) {
        print(f8::format("  {:<26} {:>10.1f} us  {}\n", key(g.spec.config), g.predicted_ns / 1e3,
                         g.pruned.empty() ? "measured" : g.pruned));
      }
    }
  }
}

// A plan of attention, which has no candidates.
Result<int> print_attention(const tuner::SweepPlan& plan, const Databases& databases,
                            const DeviceClass& device, const Global& global) {
  Json parts = Json::array();
  Table table({{"attention", Table::Align::kLeft},
               {"op", Table::Align::kLeft},
               {"recipe", Table::Align::kLeft},
               {"in the database"},
               {"about"}});
  int64_t cached_rows = 0;
  for (const tuner::PlannedLinear& part : plan.linears) {
    const Cached known = F8_TRY(cached(databases, part, device));
    cached_rows += known.ok;
    parts.push_back(attention_json(part, known));
    table.add({to_string(part.problem.dims, spec_of(part.problem.op).dims),
               std::string(to_string(part.problem.op)), part.problem.recipe,
               std::to_string(known.ok), f8::format("{:.1f} s", part.predicted_s)});
  }
  if (global.json) {
    print_json({{"device", device.name},
                {"attentions", parts},
                {"cells", plan.trials.size()},
                {"cached_ok", cached_rows},
                {"predicted_s", rounded(plan.predicted_s, 3)}});
    return kExitOk;
  }
  print_styled(table.text(stdout_color(global)));
  print(f8::format("\n{} operations of attention, about {:.0f} s on {}\n", plan.linears.size(),
                   plan.predicted_s, device.name));
  return kExitOk;
}

Result<int> run(const PlanOptions& options, const Global& global) {
  const tuner::SweepRequest request = F8_TRY(request_of(options.args));
  const Databases databases = F8_TRY(open_databases(global));
  const runtime::DeviceInfo device = planned_device();
  const tuner::SweepPlan plan = F8_TRY(plan_without_device(request, device));
  if (request.attention) return print_attention(plan, databases, device, global);
  Json linears = Json::array();
  Table table({{"m,n,k", Table::Align::kLeft},
               {"recipe", Table::Align::kLeft},
               {"generated"},
               {"pruned"},
               {"cuBLASLt"},
               {"in the database"},
               {"about"}});
  int64_t cached_rows = 0;
  for (const tuner::PlannedLinear& linear : plan.linears) {
    const Cached known = F8_TRY(cached(databases, linear, device));
    cached_rows += known.ok;
    linears.push_back(linear_json(linear, known, options.candidates));
    add_row(table, linear, known);
  }
  if (global.json) {
    print_json({{"device", device.name},
                {"linears", linears},
                {"cells", plan.trials.size()},
                {"pruned", plan.pruned},
                {"cached_ok", cached_rows},
                {"predicted_s", rounded(plan.predicted_s, 3)}});
    return kExitOk;
  }
  print_styled(table.text(stdout_color(global)));
  print(f8::format(
      "\n{} {}, {} trials, about {:.0f} s on {}. {} configurations are pruned: the cost model "
      "puts them behind the best {} of their GEMM.\n",
      plan.linears.size(), request.noun(), plan.trials.size(), plan.predicted_s, device.name,
      plan.pruned, request.options.keep));
  if (options.candidates) print_candidates(plan);
  return kExitOk;
}

}  // namespace

void add_plan(CLI::App& app, Program& program) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command =
      add_command(app, program, "plan", "what a sweep would measure; launches nothing",
                  Needs::kNothing, [options, &program] { return run(*options, program.global); });
  declare(*command, options->args);
  command->add_flag("--candidates", options->candidates,
                    "name every configuration, and why it is pruned");
}

}  // namespace f8::cli
