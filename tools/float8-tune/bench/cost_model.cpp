// cost-model: says how much slower the model's choices are than the fastest of those measured, and
// fits its constants to measurements. It needs no GPU.
#include "base/file.hpp"
#include "tools/float8-tune/bench/measured_gemms.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/refuse_db.hpp"
#include "tools/tuner/fit/suggestion_fit.hpp"

namespace f8::cli {
namespace {

using tuner::MeasuredGemm;
using tuner::Regret;

struct CostModelOptions {
  std::string train = "builtin";
  std::string test;
  std::filesystem::path output;
  int64_t folds = 5;
};

// Leaves out the GEMMs of layers that the fit has seen: they are no test.
std::vector<MeasuredGemm> unseen(const std::vector<MeasuredGemm>& test,
                                 const std::vector<MeasuredGemm>& train) {
  std::vector<MeasuredGemm> kept;
  for (const MeasuredGemm& gemm : test) {
    const bool seen = std::ranges::any_of(train, [&](const MeasuredGemm& known) {
      return known.linear.n == gemm.linear.n && known.linear.k == gemm.linear.k;
    });
    if (!seen) kept.push_back(gemm);
  }
  return kept;
}

class CostModelReport {
 public:
  void add(const std::string& what, const Regret& regret) {
    json_[what] = {{"products", regret.gemms},
                   {"median", rounded(regret.median, 4)},
                   {"p95", rounded(regret.p95, 4)},
                   {"worst", rounded(regret.worst, 4)},
                   {"worst_of", regret.worst_of},
                   {"median_to_any", rounded(regret.median_to_any, 4)},
                   {"p95_to_any", rounded(regret.p95_to_any, 4)}};
    const auto percent = [](double share) { return f8::format("{:.1f} %", 100 * share); };
    table_.add({what, std::to_string(regret.gemms), percent(regret.median), percent(regret.p95),
                percent(regret.worst), percent(regret.median_to_any), percent(regret.p95_to_any),
                regret.worst_of});
  }
  [[nodiscard]] const Json& json() const { return json_; }
  [[nodiscard]] const Table& table() const { return table_; }

 private:
  Json json_ = Json::object();
  Table table_{{{"slower than the fastest", Table::Align::kLeft},
                {"GEMMs"},
                {"median"},
                {"p95"},
                {"worst"},
                {"or cuBLASLt"},
                {"p95"},
                {"worst of", Table::Align::kLeft}}};
};

// The JSON has the source of the constants as a field, where there is one.
void show(const Json& regret, const Table& table, const Global& global,
          const std::string& source = "") {
  if (!global.json) return print_styled(table.text(stdout_color(global)));
  Json json = {{"regret", regret}};
  if (!source.empty()) json["source"] = source;
  print_json(json);
}

// Shows what a fit found, and writes its constants to -o, or after it.
Result<int> show_fit(const Json& regret, const Table& table, const runtime::CostModel& model,
                     const std::filesystem::path& output, const Global& global) {
  const std::string source = tuner::constants_source(model);
  if (!is_standard_stream(output)) show(regret, table, global, output.empty() ? source : "");
  if (!output.empty()) {
    F8_TRY(write_output(global, "-o", output, source));
  } else if (!global.json) {
    print("\n" + source);
  }
  return kExitOk;
}

Result<int> score(const CostModelOptions& options, const Global& global) {
  const auto train = F8_TRY(gemms_of("--train", options.train));
  CostModelReport report;
  const runtime::CostModel& model = runtime::CostModel::fitted();
  report.add("fitted to", tuner::regret(train, model));
  report.add("and rows of other layers", tuner::regret_with_neighbours(train, train, model));
  if (!options.test.empty()) {
    const auto test = unseen(F8_TRY(gemms_of("--test", options.test)), train);
    report.add("held out", tuner::regret(test, model));
    report.add("held out, and rows of the others",
               tuner::regret_with_neighbours(test, train, model));
  }
  show(report.json(), report.table(), global);
  return kExitOk;
}

Result<int> fit(const CostModelOptions& options, const Global& global) {
  F8_TRY(check_output(global, "-o", options.output));
  const auto train = F8_TRY(gemms_of("--train", options.train));
  std::vector<MeasuredGemm> test;
  if (!options.test.empty()) {
    test = unseen(F8_TRY(gemms_of("--test", options.test)), train);
  }
  const runtime::CostModel& start = runtime::CostModel::fitted();
  CostModelReport report;
  report.add("before", tuner::regret(train, start));
  const runtime::CostModel model = tuner::fit(train, start);
  report.add("fitted", tuner::regret(train, model));
  if (options.folds > 1) {
    report.add(f8::format("{} folds", options.folds),
               tuner::cross_validate(train, start, static_cast<int>(options.folds)));
  }
  if (!test.empty()) report.add("held out", tuner::regret(test, model));
  return show_fit(report.json(), report.table(), model, options.output, global);
}

struct SuggestionOptions {
  std::string train, test;
  std::filesystem::path output;
  int64_t folds = 5;
};

Result<std::vector<tuner::SuggestedGemm>> suggestions_of(const char* option,
                                                         const std::string& list) {
  std::vector<tuner::SuggestedGemm> all;
  for (const std::string& file : items_of(list)) {
    const std::string text = F8_TRY(of_option(option, read_input(file)));
    auto gemms = tuner::parse_suggestions(text);
    if (!gemms) {
      return fail(ErrorCode::kInvalidArgument, "{} {}: {}", option, file, gemms.error().message);
    }
    std::ranges::move(*gemms, std::back_inserter(all));
  }
  if (all.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: no measurement; `float8-tune bench suggestions --csv FILE` makes them",
                option);
  }
  return all;
}

Result<int> fit_suggestions(const SuggestionOptions& options, const Global& global) {
  F8_TRY(check_output(global, "-o", options.output));
  const auto gemms = F8_TRY(suggestions_of("--train", options.train));
  const runtime::CostModel& start = runtime::CostModel::fitted();
  std::vector<tuner::SuggestedGemm> test;
  if (!options.test.empty()) {
    test = tuner::of_other_layers(F8_TRY(suggestions_of("--test", options.test)), gemms);
  }
  const auto model = F8_TRY(of_option("--train", tuner::fit_suggestions(gemms, start)));
  const int folds = static_cast<int>(options.folds);
  const auto held_out =
      F8_TRY(of_option("--folds", tuner::cross_validate_suggestions(gemms, start, folds)));
  std::vector<std::pair<std::string, tuner::SuggestionRegret>> rows = {
      {"cuBLASLt's first", tuner::regret_of_first(gemms)},
      {"ranked first, before", tuner::regret_of_ranked(gemms, start)},
      {"ranked first, fitted", tuner::regret_of_ranked(gemms, model)},
      {f8::format("ranked first, {} folds", folds), held_out}};
  if (!test.empty()) {
    rows.emplace_back("held out: cuBLASLt's first", tuner::regret_of_first(test));
    rows.emplace_back("held out: ranked first", tuner::regret_of_ranked(test, model));
  }
  Table table(
      {{"slower than the fastest", Table::Align::kLeft}, {"GEMMs"}, {"mean"}, {"median"}, {"p95"}});
  Json json = Json::object();
  const auto percent = [](double share) { return f8::format("{:.1f} %", 100 * share); };
  for (const auto& [what, regret] : rows) {
    table.add({what, std::to_string(regret.gemms), percent(regret.mean), percent(regret.median),
               percent(regret.p95)});
    json[what] = {{"gemms", regret.gemms},
                  {"mean", rounded(regret.mean, 4)},
                  {"median", rounded(regret.median, 4)},
                  {"p95", rounded(regret.p95, 4)}};
  }
  return show_fit(json, table, model, options.output, global);
}

void declare(CLI::App& command, CostModelOptions& options) {
  refuse_db(command, "cost-model reads the databases that --train and --test name");
  command
      .add_option("--train", options.train,
                  "what it is fitted to: builtin, databases, .jsonl exports, separated by commas; "
                  "- is an export on standard input")
      ->type_name("LIST");
  command
      .add_option("--test", options.test,
                  "likewise; of these the layers (N, K) that are not in --train")
      ->type_name("LIST");
}

}  // namespace

void add_cost_model(CLI::App& app, Program& program) {
  CLI::App* group =
      add_group(app, "cost-model",
                "the model that chooses kernels where nothing was measured: score and fit");
  auto scored = std::make_shared<CostModelOptions>();
  declare(*add_command(*group, program, "score", "how much slower its choices are", Needs::kNothing,
                       [scored, &program] { return score(*scored, program.global); }),
          *scored);
  auto fitted = std::make_shared<CostModelOptions>();
  CLI::App* command =
      add_command(*group, program, "fit", "fit its constants to measurements", Needs::kNothing,
                  [fitted, &program] { return fit(*fitted, program.global); });
  declare(*command, *fitted);
  add_output(*command, "-o,--output", fitted->output,
             "write the source here (runtime/gemm/cost_model_constants.cpp)");
  add_integer(*command, "--folds", fitted->folds,
              "parts of which each is held out in turn; 1: no cross-validation", 1, 100);

  auto ranking = std::make_shared<SuggestionOptions>();
  command = add_command(*group, program, "fit-suggestions",
                        "fit how cuBLASLt's suggestions are ranked", Needs::kNothing,
                        [ranking, &program] { return fit_suggestions(*ranking, program.global); });
  refuse_db(*command, "cost-model fit-suggestions reads the tables that --train names");
  command
      ->add_option("--train", ranking->train,
                   "tables of `bench suggestions --csv`, separated by commas; - is standard input")
      ->type_name("LIST")
      ->required();
  command
      ->add_option("--test", ranking->test,
                   "likewise; of these the layers (N, K) that are not in --train")
      ->type_name("LIST");
  add_output(*command, "-o,--output", ranking->output,
             "write the source here (runtime/gemm/cost_model_constants.cpp)");
  add_integer(*command, "--folds", ranking->folds, "parts of which each is held out in turn", 2,
              100);
}

}  // namespace f8::cli
