// thresholds: the N and K below which a layer stays bf16, by the database and by torchao's rule.
#include <algorithm>
#include <memory>

#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/device_option.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/problem_option.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::cli {
namespace {

struct ThresholdsOptions {
  std::string recipe;
  std::string device;
  double margin = 0.02;
};

// One shape is no rule: any limits beyond its own sizes agree with it.
constexpr int64_t kFewestShapes = 2;

// The M at which one shape was measured.
std::string single_shapes_text(const std::vector<int64_t>& ms) {
  constexpr size_t kShown = 12;
  const size_t shown = std::min(ms.size(), kShown);
  return f8::format("M of one measured shape, which makes no rule: {}{}",
                    fmt::join(ms.begin(), ms.begin() + static_cast<int64_t>(shown), ", "),
                    shown < ms.size() ? f8::format(" and {} more", ms.size() - shown) : "");
}

Result<int> thresholds(const ThresholdsOptions& options, const Global& global) {
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable measured =
      F8_TRY(merged_table(databases, tuning_db::Database::TablePart::kLinears));
  const std::string device =
      F8_TRY(of_option("--device", device_named(measured.devices, options.device)));
  const tuning_db::Estimator estimator(measured, recipe, device);
  auto found = tuning_db::thresholds(estimator, options.margin);
  int64_t shapes = 0;
  std::vector<int64_t> single;
  for (const tuning_db::Threshold& t : found) {
    shapes += t.trials;
    if (t.trials < kFewestShapes) single.push_back(t.m);
  }
  std::erase_if(found, [](const tuning_db::Threshold& t) { return t.trials < kFewestShapes; });
  const std::span<const KnBox> boxes = torchao_boxes(recipe);
  if (global.json) {
    Json rows = Json::array();
    for (const tuning_db::Threshold& t : found) {
      rows.push_back({{"m", t.m},
                      {"n_max", t.n_max},
                      {"k_max", t.k_max},
                      {"cells", t.trials},
                      {"cells_kept", t.kept},
                      {"agree", t.agree},
                      {"torchao_agree", t.torchao_agree}});
    }
    Json rule = nullptr;
    if (!boxes.empty()) {
      rule = Json::array();
      for (const KnBox& box : boxes) {
        rule.push_back({{"n_max", box.n_max == 0 ? Json() : Json(box.n_max)},
                        {"k_max", box.k_max == 0 ? Json() : Json(box.k_max)}});
      }
    }
    print_json({{"recipe", recipe.name},
                {"device", estimator.device()},
                {"margin", options.margin},
                {"cells", shapes},
                {"thresholds", rows},
                {"m_of_one_cell", single},
                {"torchao_keeps_if_any", rule}});
    return kExitOk;
  }
  Table table({{"M"},
               {"shapes"},
               {"keep if N <="},
               {"and K <="},
               {"keeps"},
               {"agrees on"},
               {"torchao agrees on"}});
  for (const tuning_db::Threshold& t : found) {
    const bool none = t.n_max == 0 || t.k_max == 0;
    table.add({f8::format("{}", t.m), f8::format("{}", t.trials),
               none ? "never" : f8::format("{}", t.n_max), none ? "-" : f8::format("{}", t.k_max),
               f8::format("{}", t.kept), f8::format("{}/{}", t.agree, t.trials),
               f8::format("{}/{}", t.torchao_agree, t.trials)});
  }
  print_styled(table.text(stdout_color(global)));
  print("\n");
  if (shapes > 0) print(f8::format("{} shapes measured on {}\n", shapes, estimator.device()));
  if (std::ranges::find(found, 1, &tuning_db::Threshold::kept) != found.end()) {
    print(
        "where a rule keeps 1, its limits are that one shape's, and no other shape supports "
        "them\n");
  }
  if (!single.empty()) print(single_shapes_text(single) + "\n");
  std::vector<std::string> texts;
  for (const KnBox& box : boxes) texts.push_back(to_string(box));
  print(f8::format("torchao keeps bf16: {}\n", texts.empty()
                                                   ? "it has no rule for this recipe"
                                                   : f8::format("{}", fmt::join(texts, ", or "))));
  if (found.empty()) {
    note(global, "{} of recipe {}{}; on a GPU: float8-tune sweep --mnk M,N,K --recipe {} --db {}",
         single.empty() ? "no measured linear" : "no two measured linears of one M", recipe.name,
         device.empty() ? "" : " on " + device, recipe.name, database_to_write(global));
  }
  return kExitOk;
}

}  // namespace

void add_thresholds(CLI::App& app, Program& program) {
  auto options = std::make_shared<ThresholdsOptions>();
  CLI::App* command = add_command(
      app, program, "thresholds", "the sizes below which layers stay bf16, beside torchao's",
      Needs::kNothing, [options, &program] { return thresholds(*options, program.global); });
  add_recipe(*command, options->recipe)->required();
  add_device(*command, options->device);
  add_margin(*command, options->margin);
}

}  // namespace f8::cli
