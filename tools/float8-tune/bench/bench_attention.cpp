// bench attention times the fp8 forward of attention with its casts, the backward of recipe fp8 with its own, and forward
// and backward together, each beside cuDNN's in bf16, and each launch; and it compares the results with fp64. Where there
// is no cuDNN it times float8's alone, without both together, and the dequantisation that a backward in bf16 needs. It
// keeps its rows as a sweep does, and those of both together decide.
#include <algorithm>
#include <iterator>
#include <map>
#include <set>

#include "tools/float8-tune/attention_option.hpp"
#include "tools/float8-tune/bench/attention_report.hpp"
#include "tools/float8-tune/bench/bench.hpp"
#include "tools/float8-tune/sweep/sweep_job.hpp"
#include "tools/tuner/backend/attention_accuracy.hpp"

namespace f8::cli {
namespace {

struct AttentionBenchOptions : BenchOptions {
  AttentionOptions attention;
  std::string recipe = std::string(to_string(AttentionRecipe::kFp8Forward));
  std::string problem;
  int64_t length = tuner::kAccuracyTokens;
};

Result<std::vector<Problem>> problems_of(const AttentionBenchOptions& options) {
  if (!options.problem.empty()) {
    Problem problem = F8_TRY(of_option("--problem", Problem::parse(options.problem)));
    if (!is_attention(problem.op)) {
      return fail(ErrorCode::kInvalidArgument,
                  "--problem: {} is no attention; use `float8-tune bench linear` for it",
                  to_string(problem.op));
    }
    problem.op = Op::kAttentionForward;
    return std::vector{problem};
  }
  const std::vector<AttentionShape> shapes = F8_TRY(shapes_of(options.attention));
  if (shapes.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "no shapes: give --shape s8192b1h32g8d128[;...], or --problem KEY");
  }
  const AttentionRecipe recipe =
      F8_TRY(of_option("--recipe", parse_attention_recipe(options.recipe)));
  std::vector<Problem> problems;
  for (const AttentionShape& shape : shapes) {
    problems.push_back(F8_TRY(attention_problem(Op::kAttentionForward, recipe, shape)));
  }
  return problems;
}

// The accuracy of the results, once for each head size and mask of the problems, which are of one recipe.
class KnownAccuracy {
 public:
  KnownAccuracy(tuner::Bench& bench, int64_t length) : bench_(bench), length_(length) {}
  [[nodiscard]] Result<Accuracies> of(const Problem& problem) {
    if (length_ == 0) return Accuracies{};
    const AttentionShape own = tuner::accuracy_shape(problem, length_);
    const auto key = std::pair{own.head_dim, own.causal};
    if (!known_.contains(key)) {
      known_[key] = F8_TRY(bench_.attention_accuracy(attention_recipe(problem), own));
    }
    return known_[key];
  }

 private:
  tuner::Bench& bench_;
  int64_t length_;
  std::map<std::pair<int64_t, bool>, Accuracies> known_;
};

// All of them are measured by then, so that no run is left that `resume` could not go on with.
Status store(tuning_db::Database& db, const std::vector<tuner::MeasuredTrial>& all,
             const AttentionBenchOptions& options, const Global& global,
             const BenchMachine& machine) {
  if (all.empty()) return {};
  std::vector<tuning_db::TrialKey> keys;
  for (const tuner::MeasuredTrial& one : all) keys.push_back(one.key);
  const runtime::DeviceInfo& device = machine.backend->device();
  const tuning_db::RunInfo run =
      F8_TRY(db.begin_run({"bench", "attention", "--shape", options.attention.shapes, "--recipe",
                           keys.front().problem.recipe},
                          options.measuring.seed, device, device.uuid, toolchain_of(device),
                          to_method(machine.bench->attention_method(options.length)), keys));
  F8_TRY(tuner::keep(db, run.uuid, all));
  std::set<std::string_view> ops;
  for (const tuner::MeasuredTrial& one : all) ops.insert(to_string(one.key.problem.op));
  note(global, "{}: {} rows of {}", global.db.string(), all.size(), fmt::join(ops, " and "));
  return {};
}

Result<int> bench_attention(const AttentionBenchOptions& options, const Global& global) {
  const std::vector<Problem> problems = F8_TRY(problems_of(options));
  BenchMachine machine = F8_TRY(open_bench(options, global, {}));
  std::optional<tuning_db::Database> db;
  if (!global.db.empty()) {
    db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kCreate));
  }
  KnownAccuracy accuracies(*machine.bench, options.length);
  const bool color = stdout_color(global);
  Json results = Json::array();
  std::string text, compared;
  std::vector<tuner::MeasuredTrial> measured;
  int failed = 0;
  for (const Problem& problem : problems) {
    const auto bench = machine.bench->attention(problem);
    const auto accuracy = bench ? accuracies.of(problem) : Result<Accuracies>(Accuracies{});
    machine.progress->clear();
    text += text.empty() ? "" : "\n";
    if (!bench || !accuracy) {
      Json row = problem_json(problem);
      const Error& error = bench ? accuracy.error() : bench.error();
      F8_TRY(not_measured(problem, error, problems.size(), row, text));
      results.push_back(row);
      ++failed;
      continue;
    }
    results.push_back(to_json(*bench, *accuracy));
    text += text_of(*bench, color);
    const std::string table =
        accuracy->empty()
            ? ""
            : text_of(tuner::accuracy_shape(problem, options.length), *accuracy, color);
    if (!compared.contains(table)) compared += "\n" + table;
    std::ranges::move(tuner::trials_of(*bench, *accuracy), std::back_inserter(measured));
  }
  print_results(options, global,
                {{"device", machine.backend->device().name},
                 {"accuracy_shape", {{"tokens", options.length}, {"heads", tuner::kAccuracyHeads}}},
                 {"results", results}},
                text + compared);
  if (db) F8_TRY(store(*db, measured, options, global, machine));
  return failed > 0 ? kExitRegression : kExitOk;
}

}  // namespace

void add_bench_attention(CLI::App& group, Program& program) {
  auto options = std::make_shared<AttentionBenchOptions>();
  CLI::App* command = add_command(
      group, program, "attention",
      "the fp8 forward and backward with their casts beside bf16, and the accuracy of the results",
      Needs::kGpu, [options, &program] { return bench_attention(*options, program.global); });
  const AttentionFlags flags = add_attention(*command, options->attention);
  CLI::Option* recipe =
      command
          ->add_option("--recipe", options->recipe,
                       "fp8_forward: the forward, and a backward in bf16; fp8: forward and "
                       "backward")
          ->type_name(f8::format("RECIPE:{{{}}}", attention_recipes_text()));
  CLI::Option* problem =
      command->add_option("--problem", options->problem, "a problem as query prints it")
          ->type_name("KEY")
          ->excludes(recipe);
  for (CLI::Option* flag : flags.all()) problem->excludes(flag);
  declare_machine(*command, *options);
  add_seconds(*command, *options);
  add_integer(*command, "--length", options->length,
              f8::format("tokens of the data that is compared with fp64, in 4 heads; 0: none is "
                         "(default: {})",
                         options->length),
              0, 1 << 14);
}

}  // namespace f8::cli
