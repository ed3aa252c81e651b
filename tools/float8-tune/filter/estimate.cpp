// estimate: how good the estimates of shapes that nobody measured are, against shapes that somebody
// did. It needs no GPU.
#include <memory>

#include "base/file.hpp"
#include "base/text.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/device_option.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/source.hpp"
#include "tools/tuner/search/bench/shape_sweep.hpp"
#include "tuning_db/estimate/estimate_score.hpp"

namespace f8::cli {
namespace {

using tuning_db::EstimateScore;
using tuning_db::ScoredEstimate;

struct EstimateOptions {
  std::string recipes = "tensorwise,rowwise,rowwise_with_gw_hp,delayed,blockwise";
  std::string device;
  std::string truth;
  std::filesystem::path csv;
  bool elsewhere = false;
  double margin = kFilterMargin;
};

constexpr std::array<std::string_view, 10> kScoreColumns = {
    "m",        "n",           "k",           "recipe",   "speedup",
    "estimate", "estimate_lo", "estimate_hi", "evidence", "basis"};

Status add_csv(tuner::CsvText& csv, const ScoredEstimate& scored) {
  const auto& [truth, estimate] = scored;
  return csv.add(std::array<std::string, kScoreColumns.size()>{
      std::to_string(truth.shape.m), std::to_string(truth.shape.n), std::to_string(truth.shape.k),
      truth.recipe, csv_number(truth.speedup), csv_number(estimate.speedup),
      csv_number(estimate.lo), csv_number(estimate.hi), std::string(to_string(estimate.evidence)),
      estimate.basis});
}

std::string percent(double share) {
  return f8::format("{:.1f} %", 100 * share);
}

double share(size_t part, size_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

class EstimateReport {
 public:
  void add(const std::string& recipe, const EstimateScore& s) {
    json_.push_back({{"recipe", recipe},
                     {"linears", s.shapes},
                     {"coverage", rounded(share(s.held, s.shapes), 4)},
                     {"decided", s.decided},
                     {"right", rounded(share(s.right, s.decided), 4)},
                     {"bias", rounded(s.bias, 4)},
                     {"rms", rounded(s.rms, 4)},
                     {"half_width", rounded(s.half_width, 4)},
                     {"regret", rounded(s.regrets.measured, 4)},
                     {"regret_torchao", rounded(s.regrets.torchao, 4)},
                     {"regret_convert_all", rounded(s.regrets.convert_all, 4)},
                     {"regret_keep_all", rounded(s.regrets.keep_all, 4)}});
    table_.add({recipe, std::to_string(s.shapes), percent(share(s.held, s.shapes)),
                percent(s.half_width), percent(s.rms), percent(s.bias), std::to_string(s.decided),
                percent(share(s.right, s.decided)), percent(s.regrets.measured),
                percent(s.regrets.torchao), percent(s.regrets.convert_all),
                percent(s.regrets.keep_all)});
  }
  void show(const Global& global) const {
    if (global.json) {
      print_json({{"estimates", json_}});
    } else {
      print_styled(table_.text(stdout_color(global)));
    }
  }

 private:
  Json json_ = Json::array();
  Table table_{{{"recipe", Table::Align::kLeft},
                {"linears"},
                {"coverage"},
                {"half width"},
                {"rms"},
                {"bias"},
                {"decided"},
                {"right"},
                {"regret"},
                {"torchao's"},
                {"of all"},
                {"of none"}}};
};

Result<int> score_estimates(const EstimateOptions& options, const Global& global) {
  F8_TRY(check_output(global, "--csv", options.csv));
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table =
      F8_TRY(merged_table(databases, tuning_db::Database::TablePart::kLinears));
  TuningTable truth;
  if (!options.truth.empty()) {
    const auto read = [&truth](const tuning_db::Database& database) -> Status {
      truth = F8_TRY(database.table(tuning_db::Database::TablePart::kLinears));
      return {};
    };
    F8_TRY(of_option("--truth", read_source(options.truth, read)));
  }
  std::vector<DeviceClass> devices = table.devices;
  devices.insert(devices.end(), truth.devices.begin(), truth.devices.end());
  const std::string device = F8_TRY(of_option("--device", device_named(devices, options.device)));
  EstimateReport report;
  tuner::CsvText csv(kScoreColumns);
  std::vector<ScoredEstimate> all;
  for (const std::string& name : split(options.recipes, ',')) {
    const Recipe recipe = F8_TRY(recipe_of(name));
    auto found = options.elsewhere ? tuning_db::leave_device_out(table, recipe.name, device)
                 : options.truth.empty()
                     ? tuning_db::leave_layers_out(table, recipe.name, device)
                     : tuning_db::estimate_unknown(table, truth, recipe.name, device);
    if (found.empty()) continue;
    report.add(recipe.name, tuning_db::score_estimates(found, options.margin));
    for (const ScoredEstimate& one : found) F8_TRY(add_csv(csv, one));
    std::ranges::move(found, std::back_inserter(all));
  }
  if (all.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "no measured linear that the others say anything of{}; measure some with "
                "`float8-tune sweep`, or name a device that `float8-tune db info` lists",
                device.empty() ? "" : " on " + device);
  }
  report.add("all", tuning_db::score_estimates(all, options.margin));
  if (!options.csv.empty()) F8_TRY(write_output(global, "--csv", options.csv, csv.text()));
  if (!is_standard_stream(options.csv)) report.show(global);
  return kExitOk;
}

}  // namespace

void add_estimate(CLI::App& app, Program& program) {
  CLI::App* group =
      add_group(app, "estimate", "the estimates of linears that nobody measured: score");
  auto options = std::make_shared<EstimateOptions>();
  CLI::App* command = add_command(
      *group, program, "score",
      "how often intervals hold the truth, and what wrong verdicts cost beside torchao's rule",
      Needs::kNothing, [options, &program] { return score_estimates(*options, program.global); });
  command->add_option("--recipe", options->recipes, "recipes, separated by commas")
      ->type_name("LIST");
  add_device(*command, options->device);
  CLI::Option* elsewhere =
      command->add_flag("--elsewhere", options->elsewhere,
                        "estimate the device's linears from those of other devices");
  command
      ->add_option(
          "--truth", options->truth,
          "a database or a .jsonl export whose linears are estimated where --db has no row "
          "of them; without it each layer (N, K) of --db is left out in turn")
      ->type_name("FILE")
      ->excludes(elsewhere);
  add_output(*command, "--csv", options->csv,
             "also write each linear and its estimate to this file");
  add_margin(*command, options->margin);
}

}  // namespace f8::cli
