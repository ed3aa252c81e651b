// bench attention times the fp8 forward of attention with its casts, the backward of recipe fp8 with its own, and each of
// their launches, or the dequantisation that a backward in bf16 needs, and compares the results with fp64. Its rows are
// those of attention_forward and attention_backward; a decision takes both together, beside bf16, which
// benchmarks/pytorch/attention.py measures.
#include <map>

#include "recipes/attention.hpp"
#include "tools/float8-tune/bench/bench.hpp"
#include "tools/float8-tune/sweep/sweep_job.hpp"
#include "tools/float8-tune/trial_json.hpp"

namespace f8::cli {
namespace {

constexpr int64_t kAccuracyHeads = 4;

struct AttentionOptions : BenchOptions {
  std::string shape;
  std::string recipe = std::string(to_string(AttentionRecipe::kFp8Forward));
  std::string masks = "causal";
  bool causal = false, full = false;
  std::string problem;
  int64_t length = 1024;  // of the data that is compared; 0: none is
};

Result<std::vector<Problem>> problems_of(const AttentionOptions& options) {
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
  if (options.shape.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "no shapes: give --shape s8192b1h32g8d128[;...], or --problem KEY");
  }
  const AttentionRecipe recipe =
      F8_TRY(of_option("--recipe", parse_attention_recipe(options.recipe)));
  std::vector<bool> masks = F8_TRY(of_option("--masks", parse_attention_masks(options.masks)));
  if (options.causal) masks = {true};
  if (options.full) masks = {false};
  std::vector<Problem> problems;
  for (AttentionShape shape : F8_TRY(of_option("--shape", parse_attention_shapes(options.shape)))) {
    for (const bool causal : masks) {
      shape.causal = causal;
      problems.push_back(F8_TRY(attention_problem(Op::kAttentionForward, recipe, shape)));
    }
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

void add_result(Json& row, const Problem& problem, int products,
                const tuning_db::TrialResult& result) {
  add_us(row, result);
  row["tflops"] = rounded(tflops(problem, products, result.timing->median_ns));
  row["state"] = tuning_db::to_string(result.state);
  if (!result.reason.empty()) row["reason"] = result.reason;
  if (result.sm_mhz_mean) row["sm_mhz"] = rounded(*result.sm_mhz_mean, 4);
  if (result.power_w) row["power_w"] = rounded(*result.power_w, 4);
}

Json to_json(const tuner::AttentionBench& bench, const Accuracies& accuracy) {
  Json row = problem_json(bench.problem);
  add_result(row, bench.problem, kAttentionForwardProducts, bench.forward);
  if (bench.backward) {
    add_result(row["backward"], bench.problem, kAttentionBackwardProducts, *bench.backward);
  }
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

std::string text_of(const tuner::AttentionBench& bench, bool color) {
  Table table({{"kernel", Table::Align::kLeft}, {"us"}, {"TFLOP/s"}, {"GB/s"}});
  for (const tuner::KernelShare& kernel : bench.kernels) {
    table.add({kernel.name, f8::format("{:.1f}", kernel.ns / 1e3),
               kernel.products > 0 ? f8::format("{:.0f}", tflops(bench.problem, kernel)) : "",
               kernel.bytes > 0 ? f8::format("{:.0f}", kernel.bytes / kernel.ns) : ""});
  }
  const auto line = [&](const char* part, int products, const tuning_db::TrialResult& result) {
    const tuning_db::Timing& t = *result.timing;
    return f8::format("fp8 {} with casts {} {} · {:.0f} TFLOP/s{}\n", part,
                      microseconds(t.median_ns),
                      interval_text(t.ci_lo_ns / 1e3, t.ci_hi_ns / 1e3, 1),
                      tflops(bench.problem, products, t.median_ns),
                      result.state == tuning_db::TrialState::kNoisy ? " (noisy)" : "");
  };
  return f8::format(
      "{}\n{}{}kept for a backward: {:.1f} MB, in bf16 {:.1f} MB\n{}", bench.problem.key(),
      line("forward", kAttentionForwardProducts, bench.forward),
      bench.backward ? line("backward", kAttentionBackwardProducts, *bench.backward) : "",
      static_cast<double>(bench.saved_bytes) / 1e6, bf16_saved_bytes(bench.problem) / 1e6,
      table.text(color));
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
  [[nodiscard]] static AttentionShape shape(const Problem& problem, int64_t length) {
    const AttentionShape s = attention_shape(problem);
    return {.tokens = length,
            .heads_q = kAccuracyHeads,
            .heads_kv = kAccuracyHeads,
            .head_dim = s.head_dim,
            .causal = s.causal};
  }
  [[nodiscard]] Result<Accuracies> of(const Problem& problem) {
    if (length_ == 0) return Accuracies{};
    const AttentionShape own = shape(problem, length_);
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

tuning_db::Method method_of(const tuner::BenchOptions& options, int64_t length) {
  const bool hot = options.conditions.l2 == tuner::L2State::kHot;
  const Json spec = {
      {"name", "attention-v1"},
      {"verify", "sampled rows of o, or of dq, against fp64, before timing"},
      {"fill", "uniform [-1,1]"},
      {"rotate", hot ? "one operand set, which stays in L2 as far as it fits"
                     : ">= 2 x L2 and >= 2 operand sets"},
      {"clock", options.conditions.clock == tuner::ClockPolicy::kLocked ? "locked" : "steady"},
      {"accuracy_tokens", length}};
  return {.fidelity = hot ? "screen" : "final", .spec = spec.dump()};
}

struct Measured {
  Problem problem;
  tuning_db::TrialResult result;
};

// The accuracy of O is that of forward, and that of the gradients that of backward.
void add_measured(const tuner::AttentionBench& bench, const Accuracies& accuracy,
                  std::vector<Measured>& all) {
  all.push_back({bench.problem, bench.forward});
  Problem backward = bench.problem;
  backward.op = Op::kAttentionBackward;
  if (bench.backward) all.push_back({backward, *bench.backward});
  for (const tuning_db::Accuracy& a : accuracy) {
    Measured& of = a.tensor == "O" ? all[all.size() - (bench.backward ? 2 : 1)] : all.back();
    of.result.accuracy.push_back(a);
  }
}

// All of them are measured by then, so that no run is left that `resume` could not go on with.
Status store(tuning_db::Database& db, const std::vector<Measured>& all,
             const AttentionOptions& options, const Global& global,
             const runtime::DeviceInfo& device) {
  if (all.empty()) return {};
  std::vector<tuning_db::TrialKey> keys;
  for (const Measured& one : all) {
    keys.push_back({one.problem,
                    {.impl = tuning_db::Impl::kFloat8,
                     .config = R"({"kernels":"tuned"})",
                     .source_hash = ""}});
  }
  const tuning_db::RunInfo run = F8_TRY(db.begin_run(
      {"bench", "attention", "--shape", options.shape, "--recipe", all.front().problem.recipe},
      options.measuring.seed, device, device.uuid, toolchain_of(device),
      method_of(options.measuring, options.length), keys));
  const auto pending = F8_TRY(db.resume_run(run.uuid));
  for (size_t i = 0; i < pending.size(); ++i) {
    F8_TRY(db.start_trial(pending[i]));
    F8_TRY(db.finish_trial(pending[i], all[i].result));
  }
  F8_TRY(db.end_run(run.uuid, "done"));
  note(global, "{}: {} rows of attention_forward and attention_backward", global.db.string(),
       all.size());
  return {};
}

Result<int> bench_attention(const AttentionOptions& options, const Global& global) {
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
            : text_of(KnownAccuracy::shape(problem, options.length), *accuracy, color);
    if (!compared.contains(table)) compared += "\n" + table;
    add_measured(*bench, *accuracy, measured);
  }
  print_results(options, global,
                {{"device", machine.backend->device().name},
                 {"accuracy_shape", {{"tokens", options.length}, {"heads", kAccuracyHeads}}},
                 {"results", results}},
                text + compared);
  if (db) F8_TRY(store(*db, measured, options, global, machine.backend->device()));
  return failed > 0 ? kExitRegression : kExitOk;
}

}  // namespace

void add_bench_attention(CLI::App& group, Program& program) {
  auto options = std::make_shared<AttentionOptions>();
  CLI::App* command = add_command(
      group, program, "attention",
      "the fp8 forward and backward with their casts, and the accuracy of the results", Needs::kGpu,
      [options, &program] { return bench_attention(*options, program.global); });
  CLI::Option* shape =
      command
          ->add_option("--shape", options->shape,
                       "tokens, sequences, heads of queries, heads of keys, elements of a head; "
                       "several with ';'")
          ->type_name("s8192b1h32g8d128");
  CLI::Option* recipe =
      command
          ->add_option("--recipe", options->recipe,
                       "fp8_forward: the forward, and the dequantisation for a backward in bf16; "
                       "fp8: forward and backward")
          ->type_name(f8::format("RECIPE:{{{}}}", fmt::join(kAttentionRecipeNames, ",")));
  CLI::Option* masks =
      command->add_option("--masks", options->masks, "causal, full or both")->type_name("LIST");
  CLI::Option* causal = command->add_flag("--causal", options->causal, "--masks causal");
  CLI::Option* full = command->add_flag("--full", options->full, "--masks full");
  causal->excludes(masks)->excludes(full);
  full->excludes(masks);
  command->add_option("--problem", options->problem, "a problem as query prints it")
      ->type_name("KEY")
      ->excludes(shape)
      ->excludes(recipe)
      ->excludes(masks)
      ->excludes(causal)
      ->excludes(full);
  declare_machine(*command, *options);
  command->add_option("--seconds", options->measuring.final_s, "longest time of a comparison")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  add_integer(*command, "--length", options->length,
              "tokens of the data that is compared with fp64, in 4 heads; 0: none is", 0, 1 << 14);
}

}  // namespace f8::cli
