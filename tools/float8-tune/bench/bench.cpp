// bench: kernels and linears against cuBLASLt and bf16, measured in one run, interleaved.
#include "tools/float8-tune/bench/bench.hpp"

#include <algorithm>

#include "base/environment.hpp"
#include "base/file.hpp"
#include "tools/float8-tune/problem_option.hpp"

namespace f8::cli {

void declare_machine(CLI::App& command, BenchOptions& options) {
  add_integer(command, "--device", options.device, "CUDA device", 0, 1023);
  add_conditions(command, options.measuring.conditions);
}

void add_csv_option(CLI::App& command, BenchOptions& options) {
  add_output(command, "--csv", options.csv, "also write a table to this file");
}

void add_recipes(CLI::App& command, BenchOptions& options) {
  command.add_option("--recipe", options.recipes, "recipes, separated by commas")
      ->type_name("LIST");
}

void add_seconds(CLI::App& command, BenchOptions& options) {
  command.add_option("--seconds", options.measuring.final_s, "longest time of a comparison")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
}

void declare_shapes(CLI::App& command, BenchOptions& options, const char* screen_ms) {
  add_mnk(command, options.mnk);
  add_input(command, "--shapes", options.shapes,
            "shapes from a CSV file with columns m, n and k, besides those of --mnk");
  add_csv_option(command, options);
  declare_machine(command, options);
  command.add_option("--screen-ms", options.measuring.screen_ms, screen_ms)
      ->check(CLI::PositiveNumber)
      ->type_name("MS");
}

void declare(CLI::App& command, BenchOptions& options) {
  declare_shapes(command, options, "a candidate's share of the screening");
  add_recipes(command, options);
  add_seconds(command, options);
  command
      .add_option("--keep", options.measuring.keep, "generated configurations that are screened")
      ->check(CLI::Range(1, 1000))
      ->type_name("COUNT");
  command
      .add_option("--heuristics", options.measuring.heuristics, "suggestions of cuBLASLt screened")
      ->check(CLI::Range(0, 100))
      ->type_name("COUNT");
}

void declare_matmul(CLI::App& command, MatmulOptions& options) {
  declare(command, options);
  command.add_option("--op", options.op, "output, grad_input or grad_weight")->type_name("OP");
  CLI::Option* fast =
      command.add_flag("--fast", options.fast, "accumulate in the tensor core all the way");
  command.add_flag("--precise", options.precise, "promote to fp32 every 128 of K")->excludes(fast);
  add_problem(command, {.mnk = &options.mnk,
                        .recipe = &options.recipes,
                        .op = &options.op,
                        .fast = &options.fast,
                        .precise = &options.precise});
}

Result<Op> op_of(const MatmulOptions& options) {
  const Op op = F8_TRY(of_option("--op", parse_op(options.op)));
  if (!is_gemm(op)) {
    return fail(ErrorCode::kInvalidArgument,
                "--op linear: use `float8-tune bench linear` for a whole linear");
  }
  return op;
}

Result<Problem> problem_of(const MatmulOptions& options, Op op, const Recipe& recipe, Shape shape) {
  Problem problem = F8_TRY(Problem::make(op, recipe, shape));
  if (options.fast) problem.fast = true;
  if (options.precise) problem.fast = false;
  return problem;
}

Result<std::vector<Recipe>> recipes_of(const BenchOptions& options) {
  std::vector<Recipe> recipes;
  for (const std::string& name : F8_TRY(recipes_of(options.recipes))) {
    recipes.push_back(F8_TRY(recipe_of(name)));
  }
  return recipes;
}

Result<BenchWork> work_of(const BenchOptions& options) {
  BenchWork work;
  if (!options.mnk.empty()) work.shapes = F8_TRY(shapes_of(options.mnk));
  if (!options.shapes.empty()) {
    for (const Shape shape :
         F8_TRY(of_option("--shapes", tuner::read_shape_table(options.shapes)))) {
      if (std::ranges::find(work.shapes, shape) == work.shapes.end()) work.shapes.push_back(shape);
    }
  }
  if (work.shapes.empty()) {
    return fail(ErrorCode::kInvalidArgument, "no shapes: give --mnk M,N,K[;...] or --shapes FILE");
  }
  work.recipes = F8_TRY(recipes_of(options));
  return work;
}

Result<BenchMachine> open_bench(const BenchOptions& options, const Global& global,
                                std::span<const std::string_view> csv_columns) {
  F8_TRY(check_output(global, "--csv", options.csv));
  BenchMachine machine;
  machine.backend = F8_TRY(tuner::GpuBackend::create(static_cast<int>(options.device)));
  if (!options.csv.empty()) {
    machine.csv = F8_TRY(of_option("--csv", tuner::CsvFile::create(options.csv, csv_columns)));
  }
  machine.compiler = std::make_unique<tuner::CompileAhead>(
      F8_TRY(codegen::CubinCache::open(environment().cache_dir)));
  machine.progress = std::make_unique<Progress>(global);
  machine.bench = std::make_unique<tuner::Bench>(
      *machine.backend, *machine.compiler, options.measuring,
      [progress = machine.progress.get()](const std::string& text) { progress->update(text); });
  return machine;
}

void print_results(const BenchOptions& options, const Global& global, const Json& json,
                   const std::string& text) {
  const bool hot = options.measuring.conditions.l2 == tuner::L2State::kHot;
  if (global.json) {
    Json with_conditions = json;
    with_conditions["l2"] = hot ? "hot" : "cold";
    print_json(with_conditions);
  } else if (!is_standard_stream(options.csv)) {
    print_styled(text +
                 (hot ? "\nOperands stay in L2 (--hot), as they do not in training.\n" : ""));
  }
}

Status not_measured(const Problem& problem, const Error& error, size_t problems, Json& json,
                    std::string& text) {
  if (problems == 1 || error.code == ErrorCode::kCuda || error.code == ErrorCode::kEnvironment ||
      error.code == ErrorCode::kInterrupted) {
    return std::unexpected(error);
  }
  json["error"] = error.message;
  text += f8::format("{}\nnot measured: {}\n", problem.key(), error.message);
  return {};
}

std::string failed_text(std::span<const tuner::BenchRow> failed) {
  std::string text;
  for (const tuner::BenchRow& kernel : failed) {
    text += f8::format("not measured: {} {}: {}: {}\n", impl_text(kernel.candidate),
                       kernel.candidate.config, tuning_db::to_string(kernel.result.state),
                       kernel.result.reason);
  }
  return text;
}

Json failed_json(std::span<const tuner::BenchRow> failed) {
  Json json = Json::array();
  for (const tuner::BenchRow& kernel : failed) {
    json.push_back({{"impl", impl_text(kernel.candidate)},
                    {"config", kernel.candidate.config},
                    {"state", tuning_db::to_string(kernel.result.state)},
                    {"reason", kernel.result.reason}});
  }
  return json;
}

bool any_wrong(std::span<const tuner::BenchRow> failed) {
  return std::ranges::any_of(failed, [](const tuner::BenchRow& kernel) {
    return kernel.result.state == tuning_db::TrialState::kWrong;
  });
}

std::string summary_text(const std::string& what, std::span<const tuner::ShapeRatio> ratios) {
  if (ratios.size() < 2) return "";
  const tuner::ShapeSummary s = tuner::summarize(ratios);
  return f8::format(
      "{}: geometric mean {:.3f} of {}, {} at 1.00 or above, {} at 0.95 or above, worst {:.3f} "
      "({})\n",
      what, s.geometric_mean, s.count, s.at_least_100, s.at_least_095, s.worst, s.worst_of);
}

Json summary_json(std::span<const tuner::ShapeRatio> ratios) {
  const tuner::ShapeSummary s = tuner::summarize(ratios);
  return {{"count", s.count},
          {"geometric_mean", rounded(s.geometric_mean, 5)},
          {"worst", rounded(s.worst, 5)},
          {"worst_of", s.worst_of},
          {"at_least_1.00", s.at_least_100},
          {"at_least_0.95", s.at_least_095}};
}

std::string slowdown_text(const std::string& what, std::span<const tuner::ShapeRatio> ratios) {
  const tuner::ShapeSlowdown s = tuner::slowdown(ratios);
  return f8::format("{}: median {:.3f} of {}, 95th percentile {:.3f}, worst {:.3f} ({})\n", what,
                    s.median, ratios.size(), s.p95, s.worst, s.worst_of);
}

Json slowdown_json(std::span<const tuner::ShapeRatio> ratios) {
  const tuner::ShapeSlowdown s = tuner::slowdown(ratios);
  return {{"count", ratios.size()},
          {"median", rounded(s.median, 5)},
          {"p95", rounded(s.p95, 5)},
          {"worst", rounded(s.worst, 5)},
          {"worst_of", s.worst_of}};
}

void add_bench(CLI::App& app, Program& program) {
  CLI::App* group = add_group(
      app, "bench",
      "measure kernels and linears against cuBLASLt and bf16, casts against a copy, and attention");
  add_bench_matmul(*group, program);
  add_bench_epilogue(*group, program);
  add_bench_suggestions(*group, program);
  add_bench_linear(*group, program);
  add_bench_produce(*group, program);
  add_bench_attention(*group, program);
}

}  // namespace f8::cli
