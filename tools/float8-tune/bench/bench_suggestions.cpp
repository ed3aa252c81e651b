// bench suggestions times all of cuBLASLt's suggestions for a weight gradient in bf16 and says what each
// is, for the model that ranks them where none was measured.
#include <algorithm>
#include <array>

#include "tools/float8-tune/bench/bench.hpp"
#include "tools/float8-tune/refuse_db.hpp"

namespace f8::cli {
namespace {

// A row for each suggestion; benchmarks/fit/suggestions.py reads them.
constexpr std::array<std::string_view, 14> kSuggestionColumns = {
    "device",    "sms",    "d",      "m",         "n",         "k",       "heuristic",
    "algorithm", "tile_m", "tile_n", "cluster_m", "cluster_n", "split_k", "us"};

struct SuggestionBenchOptions : BenchOptions {
  std::string type = "bf16";
};

Result<Dtype> gradient_type(const SuggestionBenchOptions& options) {
  const Dtype type = F8_TRY(of_option("--type", parse_dtype(options.type)));
  if (type != Dtype::kBf16 && type != Dtype::kF32) {
    return fail(ErrorCode::kInvalidArgument, "--type {}: the gradient is in bf16 or f32",
                options.type);
  }
  return type;
}

// "h0" is cuBLASLt's own first.
std::string place_of(const tuner::SuggestionBench& bench, size_t i) {
  return f8::format("h{}{}", i, i == bench.ranked_first ? ", ranked first" : "");
}

double fastest_ns(const tuner::SuggestionBench& bench) {
  double fastest = 0;
  for (const tuning_db::TrialResult& result : bench.results) {
    if (!result.timing) continue;
    const double ns = result.timing->median_ns;
    if (fastest == 0 || ns < fastest) fastest = ns;
  }
  return fastest;
}

Json to_json(const tuner::SuggestionBench& bench) {
  Json suggestions = Json::array();
  for (size_t i = 0; i < bench.suggestions.size(); ++i) {
    const runtime::Suggestion& s = bench.suggestions[i];
    Json json = {{"heuristic", i},
                 {"algorithm", s.algorithm},
                 {"tile", {s.tile_m, s.tile_n}},
                 {"cluster", {s.cluster_m, s.cluster_n}},
                 {"split_k", s.split_k},
                 {"state", tuning_db::to_string(bench.results[i].state)},
                 {"reason", bench.results[i].reason}};
    add_us(json, bench.results[i]);
    suggestions.push_back(json);
  }
  return suggestions;
}

std::string state_text(const tuning_db::TrialResult& result) {
  const std::string_view state = tuning_db::to_string(result.state);
  return result.reason.empty() ? std::string(state) : f8::format("{}: {}", state, result.reason);
}

bool any_wrong(const tuner::SuggestionBench& bench) {
  return std::ranges::any_of(bench.results, [](const tuning_db::TrialResult& result) {
    return result.state == tuning_db::TrialState::kWrong;
  });
}

std::string text_of(const tuner::SuggestionBench& bench, bool color) {
  using enum Table::Align;
  Table table({{"suggestion", kLeft},
               {"algorithm"},
               {"tile", kLeft},
               {"cluster", kLeft},
               {"split K"},
               {"us"},
               {"over the fastest"},
               {"state", kLeft}});
  const double fastest = fastest_ns(bench);
  for (size_t i = 0; i < bench.suggestions.size(); ++i) {
    const runtime::Suggestion& s = bench.suggestions[i];
    const auto& timing = bench.results[i].timing;
    table.add({place_of(bench, i), std::to_string(s.algorithm),
               s.tile_m == 0 ? "-" : f8::format("{}x{}", s.tile_m, s.tile_n),
               f8::format("{}x{}", s.cluster_m, s.cluster_n), std::to_string(s.split_k),
               timing ? f8::format("{:.2f}", timing->median_ns / 1e3) : "-",
               timing ? f8::format("{:.3f}", timing->median_ns / fastest) : "-",
               state_text(bench.results[i])});
  }
  return f8::format("{}\n{}", bench.problem.key(), table.text(color));
}

Status add_csv(tuner::CsvFile& csv, const tuner::SuggestionBench& bench,
               const runtime::DeviceInfo& device) {
  const Shape shape = bench.problem.shape();
  for (size_t i = 0; i < bench.suggestions.size(); ++i) {
    const auto& timing = bench.results[i].timing;
    if (!timing) continue;
    const runtime::Suggestion& s = bench.suggestions[i];
    F8_TRY(csv.add(std::array<std::string, kSuggestionColumns.size()>{
        device.name, std::to_string(device.sm_count), std::string(to_string(bench.problem.d)),
        std::to_string(shape.m), std::to_string(shape.n), std::to_string(shape.k),
        std::to_string(i), std::to_string(s.algorithm), std::to_string(s.tile_m),
        std::to_string(s.tile_n), std::to_string(s.cluster_m), std::to_string(s.cluster_n),
        std::to_string(s.split_k), csv_number(timing->median_ns / 1e3)}));
  }
  return {};
}

Result<int> bench_suggestions(const SuggestionBenchOptions& options, const Global& global) {
  const BenchWork work = F8_TRY(work_of(options));
  const Dtype type = F8_TRY(gradient_type(options));
  const Recipe recipe = F8_TRY(recipe_of("rowwise_with_gw_hp"));
  BenchMachine machine = F8_TRY(open_bench(options, global, kSuggestionColumns));
  Json results = Json::array();
  std::string text;
  bool bad = false;
  for (const Shape shape : work.shapes) {
    Problem problem = F8_TRY(Problem::make(Op::kGradWeight, recipe, shape));
    problem.d = type;
    Json json = {{"problem", problem.key()}, {"m", shape.m}, {"n", shape.n}, {"k", shape.k}};
    const auto bench = machine.bench->suggestions(problem);
    machine.progress->clear();
    text += text.empty() ? "" : "\n";
    if (!bench) {
      F8_TRY(not_measured(problem, bench.error(), work.problems(), json, text));
      bad = true;
    } else {
      F8_TRY(of_option("--csv", add_csv(machine.csv, *bench, machine.backend->device())));
      json["ranked_first"] = bench->ranked_first;
      json["suggestions"] = to_json(*bench);
      bad |= any_wrong(*bench);
      text += text_of(*bench, stdout_color(global));
    }
    results.push_back(json);
  }
  print_results(options, global, {{"device", machine.backend->device().name}, {"results", results}},
                text);
  return bad ? kExitRegression : kExitOk;
}

}  // namespace

void add_bench_suggestions(CLI::App& group, Program& program) {
  auto options = std::make_shared<SuggestionBenchOptions>();
  CLI::App* command = add_command(
      group, program, "suggestions", "all of cuBLASLt's suggestions for a weight gradient in bf16",
      Needs::kGpu, [options, &program] { return bench_suggestions(*options, program.global); });
  declare_shapes(*command, *options, "a suggestion's share of the measurement");
  refuse_db(*command,
            "bench suggestions measures all of them; `float8-tune query` asks a database");
  command->add_option("--type", options->type, "type of the gradient: bf16 or f32")
      ->type_name("TYPE");
}

}  // namespace f8::cli
