// bench linear compares a linear's forward and backward with bf16 and times each of its kernels;
// over many shapes it sums up the speedups. bench experts does so for a linear of each expert. bench cast without --list compares the linear's amax
// and cast kernels with a copy.
#include "tools/float8-tune/bench/bench.hpp"
#include "tools/float8-tune/problem_option.hpp"
#include "tools/float8-tune/trial_json.hpp"

namespace f8::cli {
namespace {

struct LinearBenchOptions : BenchOptions {
  bool no_tune = false;
  GroupOptions groups;              // of bench experts
  std::optional<std::string> list;  // the weights of bench cast
};

constexpr std::array<std::string_view, 21> kLinearColumns = {"problem",
                                                             "m",
                                                             "n",
                                                             "k",
                                                             "recipe",
                                                             "fp8_us",
                                                             "fp8_lo",
                                                             "fp8_hi",
                                                             "bf16_us",
                                                             "bf16_lo",
                                                             "bf16_hi",
                                                             "speedup",
                                                             "speedup_lo",
                                                             "speedup_hi",
                                                             "state",
                                                             "fp8_kernels",
                                                             "bf16_kernels",
                                                             "linears_searched",
                                                             "untuned_over_fastest",
                                                             "untuned_lo",
                                                             "untuned_hi"};

Json to_json(const tuner::LinearBench& bench) {
  const Shape shape = bench.problem.shape();
  Json row = {{"m", shape.m},
              {"n", shape.n},
              {"k", shape.k},
              {"recipe", bench.problem.recipe},
              {"fp8_us", rounded(bench.float8.timing->median_ns / 1e3)}};
  add_groups(row, bench.problem);
  if (bench.bf16.timing) row["bf16_us"] = rounded(bench.bf16.timing->median_ns / 1e3);
  if (const auto& ratio = bench.float8.ratio) {
    add_interval(row, "speedup", ratio->ratio, ratio->lo, ratio->hi, 5);
  }
  row["state"] = tuning_db::to_string(bench.float8.state);
  if (!bench.float8.reason.empty()) row["reason"] = bench.float8.reason;
  row["fp8_kernels"] = tuner::choices_text(bench.choices);
  row["bf16_kernels"] = tuner::choices_text(bench.bf16_choices);
  if (!bench.bf16.timing) row["bf16_reason"] = bench.bf16.reason;
  if (bench.linears > 0) {
    row["linears_searched"] = bench.linears;
    row["fastest_kernels_over_best"] = rounded(bench.over_first, 4);
  }
  if (const auto& untuned = bench.untuned) {
    add_interval(row, "untuned_over_fastest", untuned->ratio, untuned->ci.lo, untuned->ci.hi, 5);
    row["untuned_kernels"] = tuner::choices_text(bench.untuned_choices);
  }
  if (bench.float8.sm_mhz_mean) row["sm_mhz"] = rounded(*bench.float8.sm_mhz_mean, 4);
  if (bench.float8.power_w) row["power_w"] = rounded(*bench.float8.power_w, 4);
  if (bench.copy_gb_per_s) row["copy_gb_per_s"] = rounded(*bench.copy_gb_per_s, 4);
  double sum = 0;
  for (const tuner::KernelShare& kernel : bench.kernels) sum += kernel.ns;
  row["kernels"] = Json::array();
  for (const tuner::KernelShare& kernel : bench.kernels) {
    Json json = {{"name", kernel.name},
                 {"us", rounded(kernel.ns / 1e3)},
                 {"share", rounded(kernel.ns / sum, 3)}};
    if (kernel.bytes > 0) json["gb_per_s"] = rounded(kernel.bytes / kernel.ns, 4);
    row["kernels"].push_back(json);
  }
  return row;
}

std::string text_of(const tuner::LinearBench& bench, bool casts, bool color) {
  Table table({{"kernel", Table::Align::kLeft}, {"us"}, {"share"}, {"GB/s"}});
  double sum = 0;
  for (const tuner::KernelShare& kernel : bench.kernels) sum += kernel.ns;
  for (const tuner::KernelShare& kernel : bench.kernels) {
    if (casts && kernel.bytes == 0) continue;
    table.add({kernel.name, f8::format("{:.1f}", kernel.ns / 1e3),
               f8::format("{:.1f} %", 100 * kernel.ns / sum),
               kernel.bytes > 0 ? f8::format("{:.0f}", kernel.bytes / kernel.ns) : ""});
  }
  const auto& ratio = bench.float8.ratio;
  std::string text = f8::format(
      "{}\nfp8 {} · bf16 {} · speedup {}{}\n{}", bench.problem.key(),
      microseconds(bench.float8.timing->median_ns),
      bench.bf16.timing ? microseconds(bench.bf16.timing->median_ns) : "-",
      ratio ? f8::format("{:.3f} [{:.3f}, {:.3f}]", ratio->ratio, ratio->lo, ratio->hi) : "-",
      bench.float8.state == tuning_db::TrialState::kNoisy ? " (noisy)" : "", table.text(color));
  if (!bench.bf16.timing) {
    text += f8::format("bf16 not measured: {}\n", bench.bf16.reason);
  } else if (is_grouped(bench.problem.op)) {
    text += f8::format("bf16 is {}, where cublaslt is a call for each expert\n",
                       tuner::choices_text(bench.bf16_choices));
  }
  if (bench.linears > 0) {
    text += f8::format("the fastest of {} linears; that of the fastest kernels takes {:.3f}x\n",
                       bench.linears, bench.over_first);
  }
  if (const auto& untuned = bench.untuned) {
    text += f8::format("without a search it takes {:.3f}x [{:.3f}, {:.3f}]\n", untuned->ratio,
                       untuned->ci.lo, untuned->ci.hi);
  }
  if (bench.copy_gb_per_s) {
    text += f8::format("a copy on the device, read and write: {:.0f} GB/s\n", *bench.copy_gb_per_s);
  }
  return text;
}

Status add_csv(tuner::CsvFile& csv, const tuner::LinearBench& bench) {
  const Shape s = bench.problem.shape();
  const auto time = [](const tuning_db::TrialResult& result, double tuning_db::Timing::*ns) {
    return result.timing ? csv_number((*result.timing).*ns / 1e3) : "";
  };
  const auto& ratio = bench.float8.ratio;
  const auto& untuned = bench.untuned;
  using Timing = tuning_db::Timing;
  return csv.add(std::array<std::string, kLinearColumns.size()>{
      bench.problem.key(),
      std::to_string(s.m),
      std::to_string(s.n),
      std::to_string(s.k),
      bench.problem.recipe,
      time(bench.float8, &Timing::median_ns),
      time(bench.float8, &Timing::ci_lo_ns),
      time(bench.float8, &Timing::ci_hi_ns),
      time(bench.bf16, &Timing::median_ns),
      time(bench.bf16, &Timing::ci_lo_ns),
      time(bench.bf16, &Timing::ci_hi_ns),
      ratio ? csv_number(ratio->ratio) : "",
      ratio ? csv_number(ratio->lo) : "",
      ratio ? csv_number(ratio->hi) : "",
      std::string(tuning_db::to_string(bench.float8.state)),
      tuner::choices_text(bench.choices),
      tuner::choices_text(bench.bf16_choices),
      std::to_string(bench.linears),
      untuned ? csv_number(untuned->ratio) : "",
      untuned ? csv_number(untuned->ci.lo) : "",
      untuned ? csv_number(untuned->ci.hi) : ""});
}

Result<int> bench_linear(const LinearBenchOptions& options, const Global& global, bool casts) {
  const BenchWork work = F8_TRY(work_of(options));
  const Groups groups = F8_TRY(groups_of(options.groups));
  const Databases databases = F8_TRY(open_databases(global));
  TuningTable tuned = F8_TRY(merged_table(databases));
  BenchMachine machine = F8_TRY(open_bench(options, global, kLinearColumns));
  machine.backend->context()->set_table(std::move(tuned));
  Json results = Json::array();
  std::string text;
  std::vector<std::vector<tuner::ShapeRatio>> speedups(work.recipes.size());
  std::vector<std::vector<tuner::ShapeRatio>> untuned(work.recipes.size());
  std::vector<int> failed(work.recipes.size());
  for (const Shape shape : work.shapes) {
    for (size_t r = 0; r < work.recipes.size(); ++r) {
      const Problem problem = F8_TRY(Problem::make(Op::kLinear, work.recipes[r], shape, groups));
      const auto bench = machine.bench->linear(problem, !options.no_tune && !casts, casts);
      machine.progress->clear();
      text += text.empty() ? "" : "\n";
      if (!bench) {
        Json row = {{"m", shape.m}, {"n", shape.n}, {"k", shape.k}, {"recipe", problem.recipe}};
        add_groups(row, problem);
        F8_TRY(not_measured(problem, bench.error(), work.problems(), row, text));
        results.push_back(row);
        ++failed[r];
        continue;
      }
      F8_TRY(of_option("--csv", add_csv(machine.csv, *bench)));
      results.push_back(to_json(*bench));
      text += text_of(*bench, casts, stdout_color(global));
      if (bench->float8.ratio) {
        speedups[r].push_back({problem.key(), bench->float8.ratio->ratio});
      }
      if (bench->untuned) untuned[r].push_back({problem.key(), bench->untuned->ratio});
    }
  }
  Json summaries = Json::array();
  std::string summary;
  int all_failed = 0;
  for (size_t r = 0; r < work.recipes.size(); ++r) {
    Json one = summary_json(speedups[r]);
    one["recipe"] = work.recipes[r].name;
    one["failed"] = failed[r];
    if (!untuned[r].empty()) one["untuned_over_fastest"] = slowdown_json(untuned[r]);
    summaries.push_back(one);
    summary += summary_text(f8::format("{}, speedup over bf16{}", work.recipes[r].name,
                                       options.measuring.reuse_weights ? ", weights reused" : ""),
                            speedups[r]);
    if (untuned[r].size() > 1) {
      summary += slowdown_text(
          f8::format("{}, time without a search over the fastest", work.recipes[r].name),
          untuned[r]);
    }
    all_failed += failed[r];
  }
  print_results(
      options, global,
      {{"device", machine.backend->device().name}, {"results", results}, {"summary", summaries}},
      text + (summary.empty() ? "" : "\n" + summary));
  return all_failed > 0 ? kExitRegression : kExitOk;
}

}  // namespace

void add_bench_linear(CLI::App& group, Program& program) {
  auto linear = std::make_shared<LinearBenchOptions>();
  CLI::App* command =
      add_command(group, program, "linear", "forward and backward against bf16", Needs::kGpu,
                  [linear, &program] { return bench_linear(*linear, program.global, false); });
  declare(*command, *linear);
  add_problem(*command, {.mnk = &linear->mnk, .recipe = &linear->recipes});
  command->add_flag("--no-tune", linear->no_tune,
                    "take kernels from the database or the cost model, look for none");

  command->add_flag("--reuse-weights", linear->measuring.reuse_weights,
                    "gradient accumulation: the weight's fp8 copies are made once, not timed");

  auto experts = std::make_shared<LinearBenchOptions>();
  command = add_command(group, program, "experts",
                        "forward and backward of experts' linears against bf16", Needs::kGpu,
                        [experts, &program]() -> Result<int> {
                          if (experts->groups.experts == 0) {
                            return fail(ErrorCode::kInvalidArgument,
                                        "--experts is required: give --experts E, or --problem KEY "
                                        "of an expert linear");
                          }
                          return bench_linear(*experts, program.global, false);
                        });
  declare(*command, *experts);
  add_groups(*command, experts->groups);
  add_problem(*command,
              {.mnk = &experts->mnk, .recipe = &experts->recipes, .groups = &experts->groups});
  command->add_flag("--no-tune", experts->no_tune,
                    "take kernels from the database or the cost model, look for none");

  auto cast = std::make_shared<LinearBenchOptions>();
  command = add_command(group, program, "cast",
                        "amax and cast kernels, of a linear or a list of weights, and a copy",
                        Needs::kGpu, [cast, &program] {
                          return cast->list ? bench_casts(*cast, *cast->list, program.global)
                                            : bench_linear(*cast, program.global, true);
                        });
  declare(*command, *cast);
  add_problem(*command, {.mnk = &cast->mnk, .recipe = &cast->recipes});
  command
      ->add_option(
          "--list", cast->list,
          "weights to cast at once and one by one; several with ';', alike as 4096,4096*32")
      ->type_name("N,K")
      ->excludes("--mnk")
      ->excludes("--shapes");
}

}  // namespace f8::cli
