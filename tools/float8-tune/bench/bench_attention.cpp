// bench attention times the fp8 forward of attention with its casts, the backward of recipe fp8 with its own, and forward
// and backward together, each beside cuDNN's in bf16, and each launch; and it compares the results with fp64. Where there
// is no cuDNN it times float8's alone, without both together, and the dequantisation that a backward in bf16 needs. It
// keeps its rows as a sweep does, and those of both together decide.
#include <map>
#include <set>

#include "tools/float8-tune/attention_option.hpp"
#include "tools/float8-tune/bench/bench.hpp"
#include "tools/float8-tune/sweep/sweep_job.hpp"
#include "tools/float8-tune/trial_json.hpp"
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

using Accuracies = std::vector<tuning_db::Accuracy>;

// What bf16 keeps for a backward: q, k, v, o and lse.
double bf16_saved_bytes(const Problem& problem) {
  const AttentionShape s = attention_shape(problem);
  return problem.bytes() + 4.0 * static_cast<double>(s.batch * s.heads_q * s.tokens);
}

double tflops(const Problem& problem, int products, double ns) {
  return products * attention_product_flops(problem) / ns / 1e3;
}

double tflops(const Problem& problem, const tuner::KernelShare& kernel) {
  return tflops(problem, kernel.products, kernel.ns);
}

// The products of an operation, as its flops count them.
int products_of(Op op) {
  return op == Op::kAttentionForward    ? kAttentionForwardProducts
         : op == Op::kAttentionBackward ? kAttentionBackwardProducts
                                        : kAttentionForwardProducts + kAttentionBackwardProducts;
}

void add_times(Json& row, const Problem& problem, Op op, const tuner::AttentionTimes& times) {
  const tuning_db::TrialResult& result = times.float8;
  add_us(row, result);
  row["tflops"] = rounded(tflops(problem, products_of(op), result.timing->median_ns));
  if (times.bf16) {
    const double bf16_ns = times.bf16->timing->median_ns;
    row["bf16_us"] = rounded(bf16_ns / 1e3);
    row["bf16_tflops"] = rounded(tflops(problem, products_of(op), bf16_ns));
  }
  if (const auto& ratio = result.ratio) {
    add_interval(row, "speedup", ratio->ratio, ratio->lo, ratio->hi, 5);
  }
  row["state"] = tuning_db::to_string(result.state);
  if (!result.reason.empty()) row["reason"] = result.reason;
  if (result.sm_mhz_mean) row["sm_mhz"] = rounded(*result.sm_mhz_mean, 4);
  if (result.power_w) row["power_w"] = rounded(*result.power_w, 4);
}

Json to_json(const tuner::AttentionBench& bench, const Accuracies& accuracy) {
  Json row = problem_json(bench.problem);
  add_times(row, bench.problem, Op::kAttentionForward, bench.forward);
  if (bench.backward) {
    add_times(row["backward"], bench.problem, Op::kAttentionBackward, *bench.backward);
  }
  if (bench.both) add_times(row["both"], bench.problem, Op::kAttention, *bench.both);
  if (!bench.no_bf16.empty()) row["bf16_reason"] = bench.no_bf16;
  row["saved_bytes"] = bench.saved_bytes;
  row["bf16_saved_bytes"] = static_cast<int64_t>(bf16_saved_bytes(bench.problem));
  row["kernels"] = Json::array();
  for (const tuner::KernelShare& kernel : bench.kernels) {
    Json json = {{"name", kernel.name}, {"us", rounded(kernel.ns / 1e3)}};
    if (kernel.bytes > 0) json["gb_per_s"] = rounded(kernel.bytes / kernel.ns, 4);
    if (kernel.products > 0) json["tflops"] = rounded(tflops(bench.problem, kernel));
    row["kernels"].push_back(json);
  }
  row["accuracy"] = accuracy_json(accuracy);
  return row;
}

std::string line_of(const Problem& problem, Op op, const tuner::AttentionTimes& times) {
  const bool fp8 = attention_recipe(problem) == AttentionRecipe::kFp8;
  const char* const name = op == Op::kAttentionForward    ? "fp8 forward"
                           : op == Op::kAttentionBackward ? "fp8 backward"
                           : fp8                          ? "fp8 forward and backward"
                                                          : "fp8 forward and bf16 backward";
  const tuning_db::Timing& t = *times.float8.timing;
  const auto& ratio = times.float8.ratio;
  return f8::format("{} with casts {} {} · {:.0f} TFLOP/s{}{}\n", name, microseconds(t.median_ns),
                    interval_text(t.ci_lo_ns / 1e3, t.ci_hi_ns / 1e3, 1),
                    tflops(problem, products_of(op), t.median_ns),
                    ratio ? f8::format(" · over cuDNN's bf16: {:.3f} {}", ratio->ratio,
                                       interval_text(ratio->lo, ratio->hi, 3))
                          : "",
                    times.float8.state == tuning_db::TrialState::kNoisy ? " (noisy)" : "");
}

std::string text_of(const tuner::AttentionBench& bench, bool color) {
  Table table({{"kernel", Table::Align::kLeft}, {"us"}, {"TFLOP/s"}, {"GB/s"}});
  for (const tuner::KernelShare& kernel : bench.kernels) {
    table.add({kernel.name, f8::format("{:.1f}", kernel.ns / 1e3),
               kernel.products > 0 ? f8::format("{:.0f}", tflops(bench.problem, kernel)) : "",
               kernel.bytes > 0 ? f8::format("{:.0f}", kernel.bytes / kernel.ns) : ""});
  }
  const Problem& problem = bench.problem;
  std::string text = problem.key() + "\n" + line_of(problem, Op::kAttentionForward, bench.forward);
  if (bench.backward) text += line_of(problem, Op::kAttentionBackward, *bench.backward);
  if (bench.both) text += line_of(problem, Op::kAttention, *bench.both);
  if (!bench.no_bf16.empty()) text += f8::format("bf16 not measured: {}\n", bench.no_bf16);
  return text + f8::format("kept for a backward: {:.1f} MB, in bf16 {:.1f} MB\n{}",
                           static_cast<double>(bench.saved_bytes) / 1e6,
                           bf16_saved_bytes(problem) / 1e6, table.text(color));
}

std::string text_of(const AttentionShape& shape, const Accuracies& accuracy, bool color) {
  using enum Table::Align;
  Table table({{"data", kLeft}, {"tensor", kLeft}, {"SQNR dB"}, {"cosine"}, {"RMSE"}});
  for (const tuning_db::Accuracy& a : accuracy) {
    table.add({a.data, a.tensor, f8::format("{:.1f}", a.sqnr_db), f8::format("{:.6f}", a.cosine),
               f8::format("{:.3g}", a.rmse)});
  }
  return f8::format("against fp64: {} tokens, {} heads of {}, {}\n{}", shape.tokens, shape.heads_q,
                    shape.head_dim, mask_name(shape.causal), table.text(color));
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

struct Measured {
  tuning_db::TrialKey trial;
  tuning_db::TrialResult result;
};

// A ratio's reference is before it.
void add_measured(const tuner::AttentionBench& bench, const Accuracies& accuracy,
                  std::vector<Measured>& all) {
  const auto add = [&](Op op, const tuner::AttentionTimes& times) {
    Problem operation = bench.problem;
    operation.op = op;
    if (times.bf16) all.push_back({tuner::bf16_attention_trial(operation), *times.bf16});
    all.push_back({tuner::attention_trial(operation), times.float8});
    all.back().result.accuracy = tuner::accuracy_of_part(op, accuracy);
  };
  add(Op::kAttentionForward, bench.forward);
  if (bench.backward) add(Op::kAttentionBackward, *bench.backward);
  if (bench.both) add(Op::kAttention, *bench.both);
}

// All of them are measured by then, so that no run is left that `resume` could not go on with.
Status store(tuning_db::Database& db, std::vector<Measured> all,
             const AttentionBenchOptions& options, const Global& global,
             const BenchMachine& machine) {
  if (all.empty()) return {};
  std::vector<tuning_db::TrialKey> keys;
  for (const Measured& one : all) keys.push_back(one.trial);
  const runtime::DeviceInfo& device = machine.backend->device();
  const tuning_db::RunInfo run =
      F8_TRY(db.begin_run({"bench", "attention", "--shape", options.attention.shapes, "--recipe",
                           keys.front().problem.recipe},
                          options.measuring.seed, device, device.uuid, toolchain_of(device),
                          to_method(machine.bench->attention_method(options.length)), keys));
  const auto pending = F8_TRY(db.resume_run(run.uuid));
  for (size_t i = 0; i < pending.size(); ++i) {
    if (all[i].result.ratio) all[i].result.ratio->pair_uuid = pending[i - 1].uuid;
    F8_TRY(db.start_trial(pending[i]));
    F8_TRY(db.finish_trial(pending[i], all[i].result));
  }
  F8_TRY(db.end_run(run.uuid, "done"));
  std::set<std::string_view> ops;
  for (const Measured& one : all) ops.insert(to_string(one.trial.problem.op));
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
  std::vector<Measured> measured;
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
    add_measured(*bench, *accuracy, measured);
  }
  print_results(options, global,
                {{"device", machine.backend->device().name},
                 {"accuracy_shape", {{"tokens", options.length}, {"heads", tuner::kAccuracyHeads}}},
                 {"results", results}},
                text + compared);
  if (db) F8_TRY(store(*db, std::move(measured), options, global, machine));
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
  command->add_option("--seconds", options->measuring.final_s, "longest time of a comparison")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  add_integer(*command, "--length", options->length,
              "tokens of the data that is compared with fp64, in 4 heads; 0: none is", 0, 1 << 14);
}

}  // namespace f8::cli
