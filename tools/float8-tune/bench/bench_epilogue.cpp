// bench epilogue says what a bias, an amax of the result and the addition to what the result held
// cost a generated GEMM, against the fastest plain one of the same group.
#include "base/text.hpp"
#include "tools/float8-tune/bench/bench.hpp"
#include "tools/float8-tune/refuse_db.hpp"

namespace f8::cli {
namespace {

struct EpilogueOptions : MatmulOptions {
  std::string type = "bf16";
  std::string epilogues = "bias,amax,bias+amax,add";
};

constexpr std::array<std::string_view, 12> kEpilogueColumns = {
    "problem",       "m",      "n",  "k",          "recipe",
    "epilogue",      "config", "us", "over_plain", "over_plain_lo",
    "over_plain_hi", "state"};

Result<std::vector<tuner::Epilogue>> epilogues_of(const EpilogueOptions& options) {
  std::vector<tuner::Epilogue> epilogues;
  for (const std::string& item : split(options.epilogues, ',')) {
    epilogues.push_back(F8_TRY(of_option("--epilogue", tuner::parse_epilogue(item))));
  }
  return epilogues;
}

Result<Dtype> type_of(const EpilogueOptions& options) {
  const Dtype type = F8_TRY(of_option("--type", parse_dtype(options.type)));
  if (is_fp8(type)) {
    return fail(ErrorCode::kInvalidArgument, "--type {}: a result is bf16, f16 or f32",
                options.type);
  }
  return type;
}

Json to_json(const tuner::EpilogueBench& bench, const tuner::EpilogueCost& cost) {
  const tuner::BenchRow& row = bench.rows[cost.row];
  Json json = {{"epilogue", to_string(cost.epilogue)},
               {"config", row.candidate.config},
               {"state", tuning_db::to_string(row.result.state)}};
  add_us(json, row.result);
  if (const auto& over = cost.over_plain) {
    add_interval(json, "over_plain", over->ratio, over->ci.lo, over->ci.hi, 5);
  }
  return json;
}

Status add_csv(tuner::CsvFile& csv, const tuner::EpilogueBench& bench,
               const tuner::EpilogueCost& cost) {
  const Shape s = bench.problem.shape();
  const tuner::BenchRow& row = bench.rows[cost.row];
  const auto& over = cost.over_plain;
  return csv.add(std::array<std::string, kEpilogueColumns.size()>{
      bench.problem.key(), std::to_string(s.m), std::to_string(s.n), std::to_string(s.k),
      bench.problem.recipe, to_string(cost.epilogue), row.candidate.config,
      csv_number(row.result.timing->median_ns / 1e3), over ? csv_number(over->ratio) : "",
      over ? csv_number(over->ci.lo) : "", over ? csv_number(over->ci.hi) : "",
      std::string(tuning_db::to_string(row.result.state))});
}

std::string text_of(const tuner::EpilogueBench& bench, bool color) {
  using enum Table::Align;
  Table table({{"epilogue", kLeft},
               {"config", kLeft},
               {"us"},
               {"interval"},
               {"over plain"},
               {"interval"},
               {"state", kLeft}});
  for (const tuner::EpilogueCost& cost : bench.costs) {
    const tuner::BenchRow& row = bench.rows[cost.row];
    const tuning_db::Timing& timing = *row.result.timing;
    const auto& over = cost.over_plain;
    table.add({to_string(cost.epilogue), row.candidate.config,
               f8::format("{:.2f}", timing.median_ns / 1e3),
               interval_text(timing.ci_lo_ns / 1e3, timing.ci_hi_ns / 1e3, 2),
               over ? f8::format("{:.3f}", over->ratio) : "-",
               over ? interval_text(over->ci.lo, over->ci.hi, 3) : "-",
               std::string(tuning_db::to_string(row.result.state))});
  }
  return f8::format("{}\n{}{}", bench.problem.key(), table.text(color), failed_text(bench.failed));
}

Result<int> bench_epilogue(const EpilogueOptions& options, const Global& global) {
  const BenchWork work = F8_TRY(work_of(options));
  const Op op = F8_TRY(op_of(options));
  const Dtype type = F8_TRY(type_of(options));
  const std::vector<tuner::Epilogue> epilogues = F8_TRY(epilogues_of(options));
  BenchMachine machine = F8_TRY(open_bench(options, global, kEpilogueColumns));
  Json results = Json::array();
  std::string text;
  bool bad = false;
  for (const Recipe& recipe : work.recipes) {
    for (const Shape shape : work.shapes) {
      Problem problem = F8_TRY(problem_of(options, op, recipe, shape));
      problem.d = type;
      Json json = {{"problem", problem.key()},
                   {"m", shape.m},
                   {"n", shape.n},
                   {"k", shape.k},
                   {"recipe", recipe.name}};
      const auto bench = machine.bench->epilogues(problem, epilogues);
      machine.progress->clear();
      text += text.empty() ? "" : "\n";
      if (!bench) {
        F8_TRY(not_measured(problem, bench.error(), work.problems(), json, text));
        results.push_back(json);
        bad = true;
        continue;
      }
      json["epilogues"] = Json::array();
      for (const tuner::EpilogueCost& cost : bench->costs) {
        json["epilogues"].push_back(to_json(*bench, cost));
        F8_TRY(of_option("--csv", add_csv(machine.csv, *bench, cost)));
      }
      json["failed"] = failed_json(bench->failed);
      bad |= bench->costs.size() <= epilogues.size() || any_wrong(bench->failed);
      results.push_back(json);
      text += text_of(*bench, stdout_color(global));
    }
  }
  print_results(options, global, {{"device", machine.backend->device().name}, {"results", results}},
                text);
  return bad ? kExitRegression : kExitOk;
}

}  // namespace

void add_bench_epilogue(CLI::App& group, Program& program) {
  auto options = std::make_shared<EpilogueOptions>();
  CLI::App* command = add_command(
      group, program, "epilogue", "what a bias, an amax and an addition cost a matmul", Needs::kGpu,
      [options, &program] { return bench_epilogue(*options, program.global); });
  declare_matmul(*command, *options);
  refuse_db(*command,
            "bench epilogue measures all candidates itself; `float8-tune query` asks a database");
  command->add_option("--type", options->type, "type of the result: bf16, f16 or f32")
      ->type_name("TYPE");
  command
      ->add_option("--epilogue", options->epilogues,
                   "bias, amax and add, joined by + and separated by commas")
      ->type_name("LIST");
}

}  // namespace f8::cli
