// bench: kernels and linears against cuBLASLt and bf16, measured in one run, interleaved.
#include "tools/tuner/bench.hpp"

#include "base/environment.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"

namespace f8::cli {
namespace {

struct Options {
  std::string mnk;
  std::string recipe = "tensorwise";
  std::string op = "output";
  std::string config;
  bool fast = false, precise = false;
  bool no_tune = false;
  int64_t device = 0;
  tuner::BenchKnobs knobs;
};

// The device, and the compilers that work ahead of it.
struct Bench {
  std::unique_ptr<tuner::GpuBackend> backend;
  std::unique_ptr<tuner::CompileAhead> compiler;
  std::unique_ptr<Progress> progress;
  std::unique_ptr<tuner::Bench> bench;
};

Result<Bench> open_bench(const Options& options, const Global& global) {
  Bench bench;
  bench.backend = F8_TRY(tuner::GpuBackend::create(static_cast<int>(options.device)));
  bench.compiler = std::make_unique<tuner::CompileAhead>(
      F8_TRY(codegen::CubinCache::open(environment().cache_dir)));
  bench.progress = std::make_unique<Progress>(global);
  bench.bench = std::make_unique<tuner::Bench>(
      *bench.backend, *bench.compiler, options.knobs,
      [progress = bench.progress.get()](const std::string& text) { progress->update(text); });
  return bench;
}

void add_timing(Json& row, const tuning_db::TrialResult& result) {
  row["state"] = tuning_db::to_string(result.state);
  if (result.timing) {
    row["us"] = rounded(result.timing->median_ns / 1e3);
    row["us_lo"] = rounded(result.timing->ci_lo_ns / 1e3);
    row["us_hi"] = rounded(result.timing->ci_hi_ns / 1e3);
  }
  if (result.rel_err) row["rel_err"] = rounded(*result.rel_err, 3);
  if (result.sm_mhz_mean) row["sm_mhz"] = rounded(*result.sm_mhz_mean, 4);
  if (result.power_w) row["power_w"] = rounded(*result.power_w, 4);
  if (!result.reason.empty()) row["reason"] = result.reason;
}

Result<int> bench_matmul(const Options& options, const Global& global) {
  const std::vector<Shape> shapes = F8_TRY(shapes_of(options.mnk));
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  const Op op = F8_TRY(of_option("--op", parse_op(options.op)));
  if (op == Op::kLinear) {
    return fail(ErrorCode::kInvalidArgument,
                "--op linear: use `float8-tune bench linear` for a whole linear");
  }
  std::optional<codegen::GemmConfig> config;
  if (!options.config.empty()) {
    config = F8_TRY(of_option("--config", codegen::parse_gemm_config(options.config)));
  }
  const Bench machine = F8_TRY(open_bench(options, global));
  Json results = Json::array();
  std::string text;
  bool wrong = false;
  for (const Shape shape : shapes) {
    Problem problem = F8_TRY(Problem::make(op, recipe, shape));
    if (options.fast) problem.fast = true;
    if (options.precise) problem.fast = false;
    const tuner::MatmulBench bench = F8_TRY(machine.bench->matmul(problem, config));
    machine.progress->clear();
    Json row = {{"problem", problem.key()},
                {"m", shape.m},
                {"n", shape.n},
                {"k", shape.k},
                {"recipe", recipe.name},
                {"op", to_string(op)},
                {"fast", problem.fast},
                {"screened", bench.screened}};
    Json kernels = Json::array();
    Table table({{"kernel", Table::Align::kLeft},
                 {"config", Table::Align::kLeft},
                 {"us"},
                 {"interval"},
                 {"TFLOP/s"},
                 {"vs cuBLASLt"},
                 {"interval"},
                 {"state", Table::Align::kLeft}});
    for (const tuner::BenchRow& kernel : bench.rows) {
      Json json = {{"impl", kernel.subject.impl},
                   {"roles", kernel.roles},
                   {"config", kernel.subject.config}};
      add_timing(json, kernel.result);
      const auto& timing = kernel.result.timing;
      const double tflops = timing ? problem.flops() / timing->median_ns / 1e3 : 0;
      if (timing) json["tflops"] = rounded(tflops, 5);
      if (kernel.to_library) {
        json["ratio_to_cublaslt"] = rounded(kernel.to_library->ratio, 5);
        json["ratio_lo"] = rounded(kernel.to_library->ci.lo, 5);
        json["ratio_hi"] = rounded(kernel.to_library->ci.hi, 5);
      }
      kernels.push_back(json);
      table.add(
          {fmt::format("{}", fmt::join(kernel.roles, ", ")), kernel.subject.config,
           timing ? fmt::format("{:.2f}", timing->median_ns / 1e3) : "-",
           timing ? fmt::format("[{:.2f}, {:.2f}]", timing->ci_lo_ns / 1e3, timing->ci_hi_ns / 1e3)
                  : "-",
           timing ? fmt::format("{:.0f}", tflops) : "-",
           kernel.to_library ? fmt::format("{:.3f}", kernel.to_library->ratio) : "-",
           kernel.to_library
               ? fmt::format("[{:.3f}, {:.3f}]", kernel.to_library->ci.lo, kernel.to_library->ci.hi)
               : "-",
           std::string(tuning_db::to_string(kernel.result.state))});
    }
    row["kernels"] = kernels;
    Json failed = Json::array();
    for (const tuner::BenchRow& kernel : bench.failed) {
      failed.push_back({{"impl", kernel.subject.impl},
                        {"config", kernel.subject.config},
                        {"state", tuning_db::to_string(kernel.result.state)},
                        {"reason", kernel.result.reason}});
      wrong |= kernel.result.state == tuning_db::TrialState::kWrong;
    }
    row["failed"] = failed;
    results.push_back(row);
    text += fmt::format("{}{}\n{}", text.empty() ? "" : "\n", problem.key(),
                        table.text(stdout_color(global)));
    for (const tuner::BenchRow& kernel : bench.failed) {
      text +=
          fmt::format("not measured: {} {}: {}: {}\n", kernel.subject.impl, kernel.subject.config,
                      tuning_db::to_string(kernel.result.state), kernel.result.reason);
    }
  }
  if (global.json) {
    print_json({{"device", machine.backend->device().name}, {"results", results}});
  } else {
    print(text);
  }
  return wrong ? kExitRegression : kExitOk;
}

Result<int> bench_linear(const Options& options, const Global& global, bool casts) {
  const std::vector<Shape> shapes = F8_TRY(shapes_of(options.mnk));
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  const Databases databases = F8_TRY(open_databases(global));
  TuningTable tuned = F8_TRY(merged_table(databases));
  const Bench machine = F8_TRY(open_bench(options, global));
  machine.backend->context()->set_table(std::move(tuned));
  Json results = Json::array();
  std::string text;
  for (const Shape shape : shapes) {
    const Problem problem = F8_TRY(Problem::make(Op::kLinear, recipe, shape));
    const tuner::LinearBench bench =
        F8_TRY(machine.bench->linear(problem, !options.no_tune && !casts, casts));
    machine.progress->clear();
    const auto& timing = *bench.float8.timing;
    Json row = {{"m", shape.m},
                {"n", shape.n},
                {"k", shape.k},
                {"recipe", recipe.name},
                {"fp8_us", rounded(timing.median_ns / 1e3)}};
    if (bench.bf16.timing) row["bf16_us"] = rounded(bench.bf16.timing->median_ns / 1e3);
    const auto& ratio = bench.float8.ratio;
    if (ratio) {
      row["speedup"] = rounded(ratio->ratio, 5);
      row["speedup_lo"] = rounded(ratio->lo, 5);
      row["speedup_hi"] = rounded(ratio->hi, 5);
    }
    row["state"] = tuning_db::to_string(bench.float8.state);
    if (!bench.float8.reason.empty()) row["reason"] = bench.float8.reason;
    row["fp8_kernels"] = tuner::choices_text(bench.choices);
    row["bf16_kernels"] = tuner::choices_text(bench.twin);
    if (bench.linears > 0) {
      row["linears_searched"] = bench.linears;
      row["fastest_kernels_over_best"] = rounded(bench.over_first, 4);
    }
    if (bench.float8.sm_mhz_mean) row["sm_mhz"] = rounded(*bench.float8.sm_mhz_mean, 4);
    if (bench.float8.power_w) row["power_w"] = rounded(*bench.float8.power_w, 4);
    if (bench.copy_gb_per_s) row["copy_gb_per_s"] = rounded(*bench.copy_gb_per_s, 4);

    Json kernels = Json::array();
    Table table({{"kernel", Table::Align::kLeft}, {"us"}, {"share"}, {"GB/s"}});
    double sum = 0;
    for (const tuner::KernelShare& kernel : bench.kernels) sum += kernel.ns;
    for (const tuner::KernelShare& kernel : bench.kernels) {
      Json json = {{"name", kernel.name},
                   {"us", rounded(kernel.ns / 1e3)},
                   {"share", rounded(kernel.ns / sum, 3)}};
      if (kernel.bytes > 0) json["gb_per_s"] = rounded(kernel.bytes / kernel.ns, 4);
      kernels.push_back(json);
      if (casts && kernel.bytes == 0) continue;
      table.add({kernel.name, fmt::format("{:.1f}", kernel.ns / 1e3),
                 fmt::format("{:.1f} %", 100 * kernel.ns / sum),
                 kernel.bytes > 0 ? fmt::format("{:.0f}", kernel.bytes / kernel.ns) : ""});
    }
    row["kernels"] = kernels;
    results.push_back(row);
    text += fmt::format("{}{}\n", text.empty() ? "" : "\n", problem.key());
    text += fmt::format(
        "fp8 {} · bf16 {} · speedup {}{}\n{}", microseconds(timing.median_ns),
        bench.bf16.timing ? microseconds(bench.bf16.timing->median_ns) : "-",
        ratio ? fmt::format("{:.3f} [{:.3f}, {:.3f}]", ratio->ratio, ratio->lo, ratio->hi) : "-",
        bench.float8.state == tuning_db::TrialState::kNoisy ? " (noisy)" : "",
        table.text(stdout_color(global)));
    if (bench.copy_gb_per_s) {
      text +=
          fmt::format("a copy on the device, read and write: {:.0f} GB/s\n", *bench.copy_gb_per_s);
    }
  }
  if (global.json) {
    print_json({{"device", machine.backend->device().name}, {"results", results}});
  } else {
    print(text);
  }
  return kExitOk;
}

void declare(CLI::App& command, Options& options) {
  add_mnk(command, options.mnk)->required();
  add_recipe(command, options.recipe);
  add_integer(command, "--device", options.device, "CUDA device", 0, 1023);
  command.add_option("--seconds", options.knobs.final_s, "longest time of a comparison")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  command
      .add_option("--screen-ms", options.knobs.screen_ms, "a candidate's share of the screening")
      ->check(CLI::PositiveNumber)
      ->type_name("MS");
  command.add_option("--keep", options.knobs.keep, "generated configurations that are screened")
      ->check(CLI::Range(1, 1000))
      ->type_name("COUNT");
  command.add_option("--heuristics", options.knobs.heuristics, "suggestions of cuBLASLt screened")
      ->check(CLI::Range(0, 100))
      ->type_name("COUNT");
}

}  // namespace

void add_bench(CLI::App& app, Program& program) {
  CLI::App* group =
      add_group(app, "bench", "measure kernels and linears against cuBLASLt and bf16");
  auto matmul = std::make_shared<Options>();
  CLI::App* command =
      add_command(*group, program, "matmul", "one scaled matmul against cuBLASLt", Needs::kGpu,
                  [matmul, &program] { return bench_matmul(*matmul, program.global); });
  declare(*command, *matmul);
  command->add_option("--op", matmul->op, "output, grad_input or grad_weight")->type_name("OP");
  command->add_option("--config", matmul->config, "this generated kernel, not the best of them")
      ->type_name("CONFIG");
  CLI::Option* fast =
      command->add_flag("--fast", matmul->fast, "accumulate in the tensor core all the way");
  command->add_flag("--precise", matmul->precise, "promote to fp32 every 128 of the contraction")
      ->excludes(fast);

  auto linear = std::make_shared<Options>();
  command =
      add_command(*group, program, "linear", "forward and backward against bf16", Needs::kGpu,
                  [linear, &program] { return bench_linear(*linear, program.global, false); });
  declare(*command, *linear);
  command->add_flag("--no-tune", linear->no_tune,
                    "take kernels from the database or the cost model, look for none");

  auto cast = std::make_shared<Options>();
  command = add_command(*group, program, "cast", "a linear's amax and cast kernels against a copy",
                        Needs::kGpu,
                        [cast, &program] { return bench_linear(*cast, program.global, true); });
  declare(*command, *cast);
}

}  // namespace f8::cli
