// bench matmul compares the best generated kernel of each shape with cuBLASLt's best, its first
// suggestion and bf16, in one group; over many shapes it sums up the ratios.
#include "tools/float8-tune/bench/bench.hpp"
#include "tools/float8-tune/problem_option.hpp"
#include "tools/float8-tune/refuse_db.hpp"

namespace f8::cli {
namespace {

struct MatmulBenchOptions : MatmulOptions {
  std::string config;
};

constexpr std::array<std::string_view, 19> kMatmulColumns = {"problem",
                                                             "m",
                                                             "n",
                                                             "k",
                                                             "recipe",
                                                             "op",
                                                             "accumulation",
                                                             "role",
                                                             "impl",
                                                             "config",
                                                             "us",
                                                             "us_lo",
                                                             "us_hi",
                                                             "tflops",
                                                             "ratio_to_cublaslt_best",
                                                             "ratio_lo",
                                                             "ratio_hi",
                                                             "state",
                                                             "reason"};

void add_timing(Json& row, const tuning_db::TrialResult& result) {
  row["state"] = tuning_db::to_string(result.state);
  add_us(row, result);
  if (result.rel_err) row["rel_err"] = rounded(*result.rel_err, 3);
  if (result.sm_mhz_mean) row["sm_mhz"] = rounded(*result.sm_mhz_mean, 4);
  if (result.power_w) row["power_w"] = rounded(*result.power_w, 4);
  if (!result.reason.empty()) row["reason"] = result.reason;
}

Json kernel_json(const Problem& problem, const tuner::BenchRow& kernel) {
  Json json = {{"impl", impl_text(kernel.candidate)},
               {"roles", kernel.roles},
               {"config", kernel.candidate.config}};
  add_timing(json, kernel.result);
  if (kernel.result.timing) json["tflops"] = rounded(tflops_of(problem, *kernel.result.timing), 5);
  if (kernel.to_baseline) {
    json["ratio_to_cublaslt"] = rounded(kernel.to_baseline->ratio, 5);
    json["ratio_lo"] = rounded(kernel.to_baseline->ci.lo, 5);
    json["ratio_hi"] = rounded(kernel.to_baseline->ci.hi, 5);
  }
  return json;
}

Status add_csv(tuner::CsvFile& csv, const Problem& problem, const tuner::BenchRow& kernel) {
  const Shape s = problem.shape();
  const auto& timing = kernel.result.timing;
  const auto& ratio = kernel.to_baseline;
  const auto time = [&](double tuning_db::Timing::*ns) {
    return timing ? csv_number((*timing).*ns / 1e3) : "";
  };
  return csv.add(std::array<std::string, kMatmulColumns.size()>{
      problem.key(), std::to_string(s.m), std::to_string(s.n), std::to_string(s.k), problem.recipe,
      std::string(to_string(problem.op)), problem.fast ? "fast" : "precise",
      f8::format("{}", fmt::join(kernel.roles, "; ")), impl_text(kernel.candidate),
      kernel.candidate.config, time(&tuning_db::Timing::median_ns),
      time(&tuning_db::Timing::ci_lo_ns), time(&tuning_db::Timing::ci_hi_ns),
      timing ? csv_number(tflops_of(problem, *timing)) : "", ratio ? csv_number(ratio->ratio) : "",
      ratio ? csv_number(ratio->ci.lo) : "", ratio ? csv_number(ratio->ci.hi) : "",
      std::string(tuning_db::to_string(kernel.result.state)), kernel.result.reason});
}

std::string text_of(const tuner::MatmulBench& bench, bool color) {
  using enum Table::Align;
  Table table({{"kernel", kLeft},
               {"config", kLeft},
               {"us"},
               {"interval"},
               {"TFLOP/s"},
               {"vs cuBLASLt"},
               {"interval"},
               {"state", kLeft}});
  for (const tuner::BenchRow& kernel : bench.rows) {
    const auto& timing = kernel.result.timing;
    const auto& ratio = kernel.to_baseline;
    table.add({kernel.roles.empty() ? impl_text(kernel.candidate)
                                    : f8::format("{}", fmt::join(kernel.roles, ", ")),
               kernel.candidate.config,
               timing ? f8::format("{:.2f}", timing->median_ns / 1e3) : "-",
               timing ? interval_text(timing->ci_lo_ns / 1e3, timing->ci_hi_ns / 1e3, 2) : "-",
               timing ? f8::format("{:.0f}", tflops_of(bench.problem, *timing)) : "-",
               ratio ? f8::format("{:.3f}", ratio->ratio) : "-",
               ratio ? interval_text(ratio->ci.lo, ratio->ci.hi, 3) : "-",
               std::string(tuning_db::to_string(kernel.result.state))});
  }
  std::string text = f8::format("{}\n{}", bench.problem.key(), table.text(color));
  if (!bench.no_baseline.empty()) text += f8::format("no cuBLASLt kernel: {}\n", bench.no_baseline);
  return text + failed_text(bench.failed);
}

// The ratios of one recipe over all shapes: generated against cuBLASLt's best.
struct ShapeSweep {
  std::vector<tuner::ShapeRatio> ratios;
  int without_baseline = 0;
  int failed = 0;
};

Result<int> bench_matmul(const MatmulBenchOptions& options, const Global& global) {
  const BenchWork work = F8_TRY(work_of(options));
  const Op op = F8_TRY(op_of(options));
  std::optional<GemmConfig> config;
  if (!options.config.empty()) {
    config = F8_TRY(of_option("--config", parse_config(options.config)));
  }
  BenchMachine machine = F8_TRY(open_bench(options, global, kMatmulColumns));
  Json results = Json::array();
  Json summaries = Json::array();
  std::string text;
  std::string summary;
  bool bad = false;
  for (const Recipe& recipe : work.recipes) {
    ShapeSweep sweep;
    bool fast = false;
    for (const Shape shape : work.shapes) {
      const Problem problem = F8_TRY(problem_of(options, op, recipe, shape));
      fast = problem.fast;
      Json row = {
          {"problem", problem.key()}, {"m", shape.m},        {"n", shape.n},        {"k", shape.k},
          {"recipe", recipe.name},    {"op", to_string(op)}, {"fast", problem.fast}};
      const auto measured = machine.bench->matmul(problem, config);
      machine.progress->clear();
      text += text.empty() ? "" : "\n";
      if (!measured) {
        F8_TRY(not_measured(problem, measured.error(), work.problems(), row, text));
        results.push_back(row);
        ++sweep.failed;
        bad = true;
        continue;
      }
      const tuner::MatmulBench& bench = *measured;
      row["screened"] = bench.screened;
      if (!bench.no_baseline.empty()) row["no_cublaslt"] = bench.no_baseline;
      row["kernels"] = Json::array();
      for (const tuner::BenchRow& kernel : bench.rows) {
        row["kernels"].push_back(kernel_json(problem, kernel));
        F8_TRY(of_option("--csv", add_csv(machine.csv, problem, kernel)));
      }
      row["failed"] = failed_json(bench.failed);
      bad |= any_wrong(bench.failed);
      results.push_back(row);
      text += text_of(bench, stdout_color(global));
      const tuner::BenchRow* generated = bench.row("generated");
      if (generated != nullptr && generated->to_baseline) {
        sweep.ratios.push_back({problem.key(), generated->to_baseline->ratio});
      } else {
        ++sweep.without_baseline;
      }
    }
    Json one = summary_json(sweep.ratios);
    one["recipe"] = recipe.name;
    one["fast"] = fast;
    one["without_cublaslt"] = sweep.without_baseline;
    one["failed"] = sweep.failed;
    summaries.push_back(one);
    summary += summary_text(f8::format("{} {} {}, generated against cuBLASLt's best", recipe.name,
                                       to_string(op), fast ? "fast" : "precise"),
                            sweep.ratios);
    if (sweep.without_baseline > 0 && work.shapes.size() > 1) {
      summary += f8::format("{}: {} of {} without a cuBLASLt counterpart\n", recipe.name,
                            sweep.without_baseline, work.shapes.size());
    }
  }
  print_results(
      options, global,
      {{"device", machine.backend->device().name}, {"results", results}, {"summary", summaries}},
      text + (summary.empty() ? "" : "\n" + summary));
  return bad ? kExitRegression : kExitOk;
}

}  // namespace

void add_bench_matmul(CLI::App& group, Program& program) {
  auto matmul = std::make_shared<MatmulBenchOptions>();
  CLI::App* command =
      add_command(group, program, "matmul", "scaled matmuls against cuBLASLt", Needs::kGpu,
                  [matmul, &program] { return bench_matmul(*matmul, program.global); });
  declare_matmul(*command, *matmul);
  refuse_db(*command,
            "bench matmul measures all candidates itself; `float8-tune query` asks a database");
  command->add_option("--config", matmul->config, "this generated kernel, not the best of them")
      ->type_name("CONFIG");
}

}  // namespace f8::cli
