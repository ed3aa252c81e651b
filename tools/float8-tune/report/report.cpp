// report: one page of figures about what the databases hold. Everything is made in memory and
// checked before the first file is written, and all files are complete before the first appears.
#include <memory>

#include "base/file.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/device_option.hpp"
#include "tools/float8-tune/filter/attention_rule.hpp"
#include "tools/float8-tune/filter/decision_rows.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/report/figures/page.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::cli {
namespace {

constexpr size_t kMaxDecisions = 1000;  // rows of the page's table

struct ReportOptions {
  ModelOptions model;
  std::string recipe;
  std::filesystem::path output = "report.html";
  std::filesystem::path svg;
  bool fuse = false;
};

// A report of a database that has nothing to show would show the built-in measurements alone.
Status check_user_database(const Global& global, const Databases& databases) {
  if (global.db.empty()) return {};
  const tuning_db::Database& database = databases.owned.front();
  const TuningTable table = F8_TRY(database.table(tuning_db::Database::TablePart::kLinears));
  if (!table.speedups().empty()) return {};
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Op op : {Op::kExperts, Op::kMlp}) {
      if (!F8_TRY(database.linears(recipe.name, tuning_db::Impl::kFloat8, op)).empty()) return {};
    }
  }
  for (const std::string_view recipe : kAttentionRecipeNames) {
    for (const Op op : {Op::kAttention, Op::kAttentionForward, Op::kAttentionBackward}) {
      if (!F8_TRY(database.linears(recipe, tuning_db::Impl::kFloat8, op)).empty()) return {};
    }
  }
  const bool is_empty = F8_TRY(database.runs()).empty();
  return fail(ErrorCode::kNotFound,
              "{}: {} {}; measure some with `float8-tune sweep --db {}`, or leave {} out for the "
              "built-in measurements",
              global.db_option, global.db.string(),
              is_empty ? "is empty: it has no trials" : "has no measured linear or attention",
              global.db.string(), global.db_option);
}

Result<report::ModelDecision> decide(const ReportOptions& options, const Recipe& recipe,
                                     const TuningTable& table) {
  const tuner::Model model = F8_TRY(load(options.model));
  tuning_db::FilterOptions how;
  how.tokens = options.model.tokens;
  how.automatic = true;
  how.fused_mlps = options.fuse;
  const auto estimator = estimator_of(table, recipe, "");
  const auto result = F8_TRY(tuning_db::filter(model.layers, how, estimator));
  const std::string name =
      is_standard_stream(options.model.model) ? "a model from standard input" : options.model.model;
  report::ModelDecision decision{
      .title = f8::format("{}: which layers to convert", fs::path(name).filename().string()),
      .summary = {},
      .table = {.caption = f8::format("Decisions at M {}, recipe {}", how.tokens, recipe.name),
                .columns = {"layer", "verdict", "speedup", "interval", "count", "M", "N", "K",
                            "evidence", "reason"},
                .rows = {}}};
  const std::vector<DecisionRow> rows = decision_rows(result);
  for (const DecisionRow& row : rows) {
    const tuning_db::FilterDecision& d = *row.decision;
    if (decision.table.rows.size() == kMaxDecisions) continue;
    const auto [speedup, interval] = speedup_cells(d);
    decision.table.rows.push_back(
        {row.name, d.convert ? "float8" : "keep bf16", speedup, interval,
         f8::format("{}", row.count), f8::format("{}", tokens_of(d.layer, how.tokens)),
         f8::format("{}", d.layer.out_features), f8::format("{}", d.layer.in_features),
         std::string(to_string(d.evidence)), d.reason});
  }
  if (rows.size() > kMaxDecisions) {
    decision.table.caption += f8::format(", the first {} of {} rows", kMaxDecisions, rows.size());
  }
  decision.summary = f8::format(
      "{} to float8: recipe {}, M {}{}{}{}. These linears together are {:.3f} times as "
      "fast as in bf16. float8-tune filter writes the same decision for a trainer.",
      count_text(result), recipe.name, how.tokens,
      options.model.tp > 1 ? f8::format(", {} tensor-parallel ranks", options.model.tp) : "",
      options.model.ep > 1 ? f8::format(", {} expert-parallel ranks", options.model.ep) : "",
      result.device.empty() ? "" : ", " + result.device, result.estimated_model_speedup);
  return decision;
}

// Says of each attention what filter decides: of the recipes that can be taken it takes the first.
Status decide_attentions(report::Measurements& measurements, const Databases& databases) {
  for (report::AttentionTimes& times : measurements.attentions) {
    if (!times.both) continue;
    const AttentionVerdicts verdicts =
        F8_TRY(attention_verdicts(times.shape, databases, times.device, kFilterMargin));
    const AttentionVerdict& best = verdicts.front();
    for (const AttentionVerdict& each : verdicts) {
      if (each.problem.recipe != times.recipe) continue;
      const bool is_behind = &each != &best && each.verdict.convert;
      times.decision =
          is_behind ? "not taken: " + best.problem.recipe + " is faster" : each.verdict.reason;
    }
  }
  return {};
}

std::vector<NamedBytes> svg_files(const ReportOptions& options,
                                  const std::vector<report::Figure>& figures) {
  std::vector<NamedBytes> files;
  for (const report::Figure& figure : figures) {
    if (figure.body.empty()) continue;
    files.push_back({options.svg / (figure.name + ".svg"), report::svg_file(figure)});
  }
  return files;
}

Json to_json(const ReportOptions& options, const std::vector<report::Figure>& figures,
             size_t bytes) {
  Json json = {{"output", options.output.string()}, {"bytes", bytes}, {"figures", Json::array()}};
  for (const report::Figure& figure : figures) {
    Json one = {{"name", figure.name},
                {"title", figure.title},
                {"description", figure.description},
                {"device", figure.device},
                {"recipe", figure.recipe},
                {"m", figure.m == 0 ? Json() : Json(figure.m)}};
    if (!options.svg.empty() && !figure.body.empty()) {
      one["svg"] = (options.svg / (figure.name + ".svg")).string();
    }
    json["figures"].push_back(std::move(one));
  }
  return json;
}

Result<int> make_report(const ReportOptions& options, const Global& global) {
  F8_TRY(check_output(global, "-o", options.output));
  if (is_standard_stream(options.svg)) {
    return fail(ErrorCode::kInvalidArgument, "--svg: - is no folder; name one");
  }
  std::error_code error;
  if (fs::exists(options.svg, error) && !fs::is_directory(options.svg, error)) {
    return fail(ErrorCode::kInvalidArgument, "--svg: {} is no directory; name a folder",
                options.svg.string());
  }
  const Databases databases = F8_TRY(open_databases(global));
  F8_TRY(check_user_database(global, databases));
  TuningTable table = F8_TRY(merged_table(databases));
  if (table.speedups().empty()) {
    return fail(ErrorCode::kNotFound,
                "the built-in measurements have no linear; give a database with --db");
  }
  report::Page page{.version = FLOAT8_VERSION, .figures = {}, .model = {}, .recipe = {}};
  if (!options.model.model.empty()) {
    const Recipe recipe = F8_TRY(recipe_of(options.recipe));
    page.model = F8_TRY(decide(options, recipe, table));
    page.recipe = recipe.name;
  }
  std::vector<report::NamedDatabase> named;
  for (const tuning_db::Database* database : databases.pointers()) {
    const bool is_users = named.empty() && !global.db.empty();
    named.push_back({is_users ? global.db.filename().string() : "built-in", database});
  }
  report::Measurements measurements = F8_TRY(report::collect(named, std::move(table)));
  F8_TRY(decide_attentions(measurements, databases));
  page.figures = report::all_figures(measurements);
  std::string html = report::page_html(page, measurements);
  std::vector<NamedBytes> files;
  if (!options.svg.empty()) {
    F8_TRY(of_option("--svg", make_folders(options.svg)));
    files = svg_files(options, page.figures);
  }
  const size_t size = html.size();
  files.push_back({output_path(options.output), std::move(html)});
  F8_TRY(write_files_atomic(files));
  if (!is_standard_stream(options.output)) note(global, "wrote {}", options.output.string());
  if (!options.svg.empty()) {
    note(global, "wrote {} figures into {}", files.size() - 1, options.svg.string());
  }
  if (global.json) print_json(to_json(options, page.figures, size));
  return kExitOk;
}

}  // namespace

void add_report(CLI::App& app, Program& program) {
  auto options = std::make_shared<ReportOptions>();
  CLI::App* command = add_command(
      app, program, "report", "one page with figures of what the databases hold", Needs::kNothing,
      [options, &program] { return make_report(*options, program.global); });
  add_output(*command, "-o,--output", options->output, "the page, one file of HTML");
  command->add_option("--svg", options->svg, "also write each figure as an SVG file")
      ->type_name("DIR");
  const ModelFlags flags = add_model(*command, options->model);
  CLI::Option* recipe = add_recipe(*command, options->recipe);
  flags.model->needs(flags.tokens)->needs(recipe);
  for (CLI::Option* option : {flags.tokens, flags.tp, recipe}) option->needs(flags.model);
  add_fuse(*command, options->fuse)->needs(flags.model);
  for (CLI::Option* option : add_model_experts(*command, options->model)) {
    option->needs(flags.model);
  }
}

}  // namespace f8::cli
