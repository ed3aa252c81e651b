// bench attention times the fp8 forward of attention with its casts, each of its launches, and the dequantisation
// that a backward in bf16 needs, and compares O with fp64. Its rows are those of attention_forward; a decision takes
// forward and backward together, beside bf16, which benchmarks/pytorch/attention.py measures.
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
  std::string masks = "causal";
  bool causal = false, full = false;
  std::string problem;
  int64_t length = 1024;  // of the data that O is compared on; 0: it is not
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
  std::vector<bool> masks = F8_TRY(of_option("--masks", parse_attention_masks(options.masks)));
  if (options.causal) masks = {true};
  if (options.full) masks = {false};
  std::vector<Problem> problems;
  for (AttentionShape shape : F8_TRY(of_option("--shape", parse_attention_shapes(options.shape)))) {
    for (const bool causal : masks) {
      shape.causal = causal;
      problems.push_back(F8_TRY(attention_problem(Op::kAttentionForward, shape)));
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

double tflops(const Problem& problem, double ns) {
  return problem.flops() / ns / 1e3;
}

Json to_json(const tuner::AttentionBench& bench, const Accuracies& accuracy) {
  Json row = problem_json(bench.problem);
  add_us(row, bench.forward);
  row["tflops"] = rounded(tflops(bench.problem, bench.forward.timing->median_ns));
  row["state"] = tuning_db::to_string(bench.forward.state);
  if (!bench.forward.reason.empty()) row["reason"] = bench.forward.reason;
  if (bench.forward.sm_mhz_mean) row["sm_mhz"] = rounded(*bench.forward.sm_mhz_mean, 4);
  if (bench.forward.power_w) row["power_w"] = rounded(*bench.forward.power_w, 4);
  row["saved_bytes"] = bench.saved_bytes;
  row["bf16_saved_bytes"] = static_cast<int64_t>(bf16_saved_bytes(bench.problem));
  row["kernels"] = Json::array();
  for (const tuner::KernelShare& kernel : bench.kernels) {
    Json json = {{"name", kernel.name}, {"us", rounded(kernel.ns / 1e3)}};
    if (kernel.bytes > 0) json["gb_per_s"] = rounded(kernel.bytes / kernel.ns, 4);
    if (kernel.bytes == 0) json["tflops"] = rounded(tflops(bench.problem, kernel.ns));
    row["kernels"].push_back(json);
  }
  row["accuracy"] = accuracy_json(accuracy);
  return row;
}

std::string text_of(const tuner::AttentionBench& bench, bool color) {
  Table table({{"kernel", Table::Align::kLeft}, {"us"}, {"TFLOP/s"}, {"GB/s"}});
  for (const tuner::KernelShare& kernel : bench.kernels) {
    const bool cast = kernel.bytes > 0;
    table.add({kernel.name, f8::format("{:.1f}", kernel.ns / 1e3),
               cast ? "" : f8::format("{:.0f}", tflops(bench.problem, kernel.ns)),
               cast ? f8::format("{:.0f}", kernel.bytes / kernel.ns) : ""});
  }
  const tuning_db::Timing& t = *bench.forward.timing;
  return f8::format(
      "{}\nfp8 forward with casts {} {} · {:.0f} TFLOP/s{}\nkept for a backward: {:.1f} MB, in "
      "bf16 "
      "{:.1f} MB\n{}",
      bench.problem.key(), microseconds(t.median_ns),
      interval_text(t.ci_lo_ns / 1e3, t.ci_hi_ns / 1e3, 1), tflops(bench.problem, t.median_ns),
      bench.forward.state == tuning_db::TrialState::kNoisy ? " (noisy)" : "",
      static_cast<double>(bench.saved_bytes) / 1e6, bf16_saved_bytes(bench.problem) / 1e6,
      table.text(color));
}

std::string text_of(const AttentionShape& shape, const Accuracies& accuracy, bool color) {
  Table table({{"data", Table::Align::kLeft}, {"SQNR dB"}, {"cosine"}, {"RMSE"}});
  for (const tuning_db::Accuracy& a : accuracy) {
    table.add({a.data, f8::format("{:.1f}", a.sqnr_db), f8::format("{:.6f}", a.cosine),
               f8::format("{:.3g}", a.rmse)});
  }
  return f8::format("O against fp64: {} tokens, {} heads of {}, {}\n{}", shape.tokens,
                    shape.heads_q, shape.head_dim, mask_name(shape.causal), table.text(color));
}

// O's accuracy, once for each head size and mask of the problems.
class AccuracyOfO {
 public:
  AccuracyOfO(tuner::Bench& bench, int64_t length) : bench_(bench), length_(length) {}
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
    if (!known_.contains(key)) known_[key] = F8_TRY(bench_.attention_accuracy(own));
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
      {"verify", "sampled rows of o against fp64, before timing"},
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
      {"bench", "attention", "--shape", options.shape}, options.measuring.seed, device, device.uuid,
      toolchain_of(device), method_of(options.measuring, options.length), keys));
  const auto pending = F8_TRY(db.resume_run(run.uuid));
  for (size_t i = 0; i < pending.size(); ++i) {
    F8_TRY(db.start_trial(pending[i]));
    F8_TRY(db.finish_trial(pending[i], all[i].result));
  }
  F8_TRY(db.end_run(run.uuid, "done"));
  note(global, "{}: {} rows of attention_forward", global.db.string(), all.size());
  return {};
}

Result<int> bench_attention(const AttentionOptions& options, const Global& global) {
  const std::vector<Problem> problems = F8_TRY(problems_of(options));
  BenchMachine machine = F8_TRY(open_bench(options, global, {}));
  std::optional<tuning_db::Database> db;
  if (!global.db.empty()) {
    db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kCreate));
  }
  AccuracyOfO accuracies(*machine.bench, options.length);
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
        accuracy->empty() ? ""
                          : text_of(AccuracyOfO::shape(problem, options.length), *accuracy, color);
    if (!compared.contains(table)) compared += "\n" + table;
    measured.push_back({problem, bench->forward});
    measured.back().result.accuracy = *accuracy;
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
      group, program, "attention", "the fp8 forward with its casts, and O's accuracy", Needs::kGpu,
      [options, &program] { return bench_attention(*options, program.global); });
  CLI::Option* shape =
      command
          ->add_option("--shape", options->shape,
                       "tokens, sequences, heads of queries, heads of keys, elements of a head; "
                       "several with ';'")
          ->type_name("s8192b1h32g8d128");
  CLI::Option* masks =
      command->add_option("--masks", options->masks, "causal, full or both")->type_name("LIST");
  CLI::Option* causal = command->add_flag("--causal", options->causal, "--masks causal");
  CLI::Option* full = command->add_flag("--full", options->full, "--masks full");
  causal->excludes(masks)->excludes(full);
  full->excludes(masks);
  command->add_option("--problem", options->problem, "a problem as query prints it")
      ->type_name("KEY")
      ->excludes(shape)
      ->excludes(masks)
      ->excludes(causal)
      ->excludes(full);
  declare_machine(*command, *options);
  command->add_option("--seconds", options->measuring.final_s, "longest time of a comparison")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  add_integer(*command, "--length", options->length,
              "tokens of the data that O is compared with fp64 on, in 4 heads; 0: it is not", 0,
              1 << 14);
}

}  // namespace f8::cli
