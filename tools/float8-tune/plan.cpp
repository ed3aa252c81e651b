// plan: what a sweep of these shapes would measure, what its model rules out and why, what the
// databases hold already, and how long it would take. Launches nothing and needs no GPU.
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/sweep_args.hpp"
#include "tools/float8-tune/trial_json.hpp"
#include "tools/tuner/search/sweep_plan.hpp"

namespace f8::cli {
namespace {

struct Options {
  SweepArgs args;
  bool candidates = false;
};

struct Cached {
  int64_t ok = 0, other = 0;
  std::optional<tuning_db::TrialRow> linear;  // the best float8 row
};

Result<Cached> cached(const Databases& databases, const tuner::PlannedLinear& linear) {
  Cached found;
  std::vector<Problem> problems = {linear.problem};
  for (const tuner::PlannedGemm& gemm : linear.gemms) problems.push_back(gemm.problem);
  for (const tuning_db::Database* db : databases.pointers()) {
    for (const Problem& problem : problems) {
      for (const tuning_db::TrialRow& row : F8_TRY(db->trials(problem))) {
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
               {"cublaslt", gemm.fp8_heuristics},
               {"bf16_cublaslt", gemm.bf16_heuristics}};
  if (!candidates) return json;
  Json rows = Json::array();
  for (const tuner::Generated& g : gemm.generated) {
    Json row = {{"config", codegen::key(g.spec.config)},
                {"predicted_us", rounded(g.predicted_ns / 1e3)}};
    if (!g.pruned.empty()) row["pruned"] = g.pruned;
    rows.push_back(row);
  }
  json["candidates"] = rows;
  return json;
}

Result<int> run(const Options& options, const Global& global) {
  const tuner::SweepRequest request = F8_TRY(request_of(options.args));
  const Databases databases = F8_TRY(open_databases(global));
  const runtime::DeviceInfo device = tuner::h100();
  // How many suggestions cuBLASLt has is known on the device alone: as many as are asked for.
  const tuner::SweepPlan plan =
      F8_TRY(tuner::plan_sweep(request, device, [&](const Problem&, bool) -> Result<int> {
        return request.knobs.heuristics;
      }));

  Json linears = Json::array();
  Table table({{"m"},
               {"n"},
               {"k"},
               {"recipe", Table::Align::kLeft},
               {"generated"},
               {"pruned"},
               {"cuBLASLt"},
               {"in the database"},
               {"about"}});
  int64_t cached_rows = 0;
  for (const tuner::PlannedLinear& linear : plan.linears) {
    const Shape s = linear.problem.shape;
    const Cached known = F8_TRY(cached(databases, linear));
    cached_rows += known.ok;
    Json gemms = Json::array();
    int64_t generated = 0;
    int64_t pruned = 0;
    int64_t library = 0;
    for (const tuner::PlannedGemm& gemm : linear.gemms) {
      const Json json = gemm_json(gemm, options.candidates);
      generated += json["generated"].get<int64_t>();
      pruned += json["pruned"].get<int64_t>();
      library += gemm.fp8_heuristics + gemm.bf16_heuristics;
      gemms.push_back(json);
    }
    Json row = {{"problem", linear.problem.key()},
                {"m", s.m},
                {"n", s.n},
                {"k", s.k},
                {"recipe", linear.problem.recipe},
                {"predicted_s", rounded(linear.predicted_s, 3)},
                {"cached_ok", known.ok},
                {"cached_other", known.other},
                {"gemms", gemms}};
    if (known.linear && known.linear->result.ratio) {
      row["cached_speedup"] = rounded(known.linear->result.ratio->ratio, 4);
    }
    linears.push_back(row);
    table.add({std::to_string(s.m), std::to_string(s.n), std::to_string(s.k), linear.problem.recipe,
               std::to_string(generated), std::to_string(pruned), std::to_string(library),
               std::to_string(known.ok), fmt::format("{:.1f} s", linear.predicted_s)});
  }
  if (global.json) {
    print_json({{"device", device.name},
                {"linears", linears},
                {"cells", plan.cells.size()},
                {"pruned", plan.pruned},
                {"cached_ok", cached_rows},
                {"predicted_s", rounded(plan.predicted_s, 3)}});
    return kExitOk;
  }
  print(table.text(stdout_color(global)));
  print(fmt::format(
      "\n{} linears, {} cells, about {:.0f} s of an H100. {} configurations are pruned: the cost "
      "model puts them behind the best {} of their GEMM.\n",
      plan.linears.size(), plan.cells.size(), plan.predicted_s, plan.pruned, request.knobs.keep));
  if (options.candidates) {
    for (const tuner::PlannedLinear& linear : plan.linears) {
      for (const tuner::PlannedGemm& gemm : linear.gemms) {
        print(fmt::format("\n{}\n", gemm.problem.key()));
        for (const tuner::Generated& g : gemm.generated) {
          print(fmt::format("  {:<26} {:>10.1f} us  {}\n", codegen::key(g.spec.config),
                            g.predicted_ns / 1e3, g.pruned.empty() ? "measured" : g.pruned));
        }
      }
    }
  }
  return kExitOk;
}

}  // namespace

void add_plan(CLI::App& app, Program& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      add_command(app, program, "plan", "what a sweep would measure; launches nothing",
                  Needs::kNothing, [options, &program] { return run(*options, program.global); });
  declare(*command, options->args);
  command->add_flag("--candidates", options->candidates,
                    "name every configuration, and why it is pruned");
}

}  // namespace f8::cli
