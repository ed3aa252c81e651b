// thresholds: the N and K below which a layer stays bf16, by the database and by torchao's rule.
#include <memory>

#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/problem_option.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::cli {
namespace {

struct Options {
  std::string recipe;
  double margin = 0.02;
};

// torchao's rule: a layer stays bf16 where one of these boxes holds it; 0 is no bound.
struct Box {
  int64_t n_max;
  int64_t k_max;
};

std::vector<Box> torchao_boxes(const std::string& recipe) {
  if (recipe == "rowwise") return {{2048, 0}, {0, 1024}, {4096, 2048}};
  if (recipe == "tensorwise") return {{1024, 4096}};
  return {};
}

std::string text_of(const Box& box) {
  if (box.k_max == 0) return f8::format("N <= {}", box.n_max);
  if (box.n_max == 0) return f8::format("K <= {}", box.k_max);
  return f8::format("N <= {} and K <= {}", box.n_max, box.k_max);
}

Result<int> thresholds(const Options& options, const Global& global) {
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable measured =
      F8_TRY(merged_table(databases, tuning_db::Database::TablePart::kLinears));
  const auto found =
      tuning_db::thresholds(tuning_db::Estimator(measured, recipe.name), options.margin);
  const std::vector<Box> boxes = torchao_boxes(recipe.name);
  if (global.json) {
    Json rows = Json::array();
    for (const tuning_db::Threshold& t : found) {
      rows.push_back({{"m", t.m},
                      {"n_max", t.n_max},
                      {"k_max", t.k_max},
                      {"cells", t.trials},
                      {"agree", t.agree},
                      {"torchao_agree", t.torchao_agree}});
    }
    Json rule = nullptr;
    if (!boxes.empty()) {
      rule = Json::array();
      for (const Box& box : boxes) {
        rule.push_back({{"n_max", box.n_max == 0 ? Json() : Json(box.n_max)},
                        {"k_max", box.k_max == 0 ? Json() : Json(box.k_max)}});
      }
    }
    print_json({{"recipe", recipe.name},
                {"margin", options.margin},
                {"thresholds", rows},
                {"torchao_keeps_if_any", rule}});
    return kExitOk;
  }
  Table table({{"M"}, {"keep if N <="}, {"and K <="}, {"agrees on"}, {"torchao agrees on"}});
  for (const tuning_db::Threshold& t : found) {
    const bool none = t.n_max == 0 || t.k_max == 0;
    table.add({f8::format("{}", t.m), none ? "never" : f8::format("{}", t.n_max),
               none ? "-" : f8::format("{}", t.k_max), f8::format("{}/{}", t.agree, t.trials),
               f8::format("{}/{}", t.torchao_agree, t.trials)});
  }
  print_styled(table.text(stdout_color(global)));
  std::vector<std::string> texts;
  for (const Box& box : boxes) texts.push_back(text_of(box));
  print(f8::format("\ntorchao keeps bf16: {}\n",
                   texts.empty() ? "it has no rule for this recipe"
                                 : f8::format("{}", fmt::join(texts, ", or "))));
  if (found.empty()) {
    note(
        global,
        "no measured linear of recipe {}; on a GPU: float8-tune sweep --mnk M,N,K --recipe {} --db "
        "{}",
        recipe.name, recipe.name, database_to_write(global));
  }
  return kExitOk;
}

}  // namespace

void add_thresholds(CLI::App& app, Program& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = add_command(
      app, program, "thresholds", "the sizes below which layers stay bf16, beside torchao's",
      Needs::kNothing, [options, &program] { return thresholds(*options, program.global); });
  add_recipe(*command, options->recipe)->required();
  add_margin(*command, options->margin);
}

}  // namespace f8::cli
