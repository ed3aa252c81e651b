// replay: what strategies of searching choose and cost, on the times of exhaustive sweeps. It needs
// no GPU.
#include "tools/tuner/fit/replay.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "base/text.hpp"
#include "tools/float8-tune/bench/measured_gemms.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/refuse_db.hpp"
#include "tools/float8-tune/sweep/sweep_args.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::cli {
namespace {

using tuner::ExhaustiveGemm;
using tuner::Strategy;

struct ReplayOptions {
  std::string sets;
  std::string strategies = "untuned,race,auto,topk,halving,exhaustive";
  std::string recipes;
  bool curve = false;
  int64_t seeds = 5;
  tuner::SweepOptions measuring;
};

constexpr int kLevels[] = {1, 2, 4, 8, 16, 32};  // of --curve: how many configurations are measured

// The searches of one strategy on the GEMMs of a device and a recipe.
struct Scores {
  std::vector<double> regrets;  // one for each GEMM and seed
  double gpu_s = 0;
  double candidates = 0;
  std::set<Shape> shapes;
  size_t gemms = 0;

  void add(const Scores& other) {
    regrets.insert(regrets.end(), other.regrets.begin(), other.regrets.end());
    gpu_s += other.gpu_s;
    candidates += other.candidates;
    shapes.insert(other.shapes.begin(), other.shapes.end());
    gemms += other.gemms;
  }
};
struct Group {
  std::string device, recipe;
  auto operator<=>(const Group&) const = default;
};
constexpr const char* kAllRecipes = "all";

Result<std::vector<Strategy>> strategies_of(const ReplayOptions& options) {
  std::vector<Strategy> strategies;
  for (const std::string& name : split(options.strategies, ',')) {
    strategies.push_back(
        F8_TRY(of_option("--strategy", tuner::find_strategy(name, options.measuring))));
  }
  for (const int keep : kLevels) {
    if (!options.curve) break;
    Strategy level = F8_TRY(tuner::find_strategy("auto", options.measuring));
    level.options.keep = keep;
    level.name = f8::format("auto --keep {}", keep);
    strategies.push_back(std::move(level));
  }
  return strategies;
}

std::string measured_recipe(const ExhaustiveGemm& gemm) {
  const auto problem = Problem::parse(gemm.measured.problem);
  return problem ? problem->recipe : "";
}

Result<tuner::ExhaustiveSet> set_of(const ReplayOptions& options) {
  if (options.sets.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "no set: give --set the files of `float8-tune sweep --exhaustive`, databases or "
                ".jsonl exports; `tar xf tuning_db/data/exhaustive.tar.xz` unpacks float8's own");
  }
  const auto gemms = F8_TRY(gemms_of("--set", options.sets));
  tuner::ExhaustiveSet set = tuner::exhaustive_set(gemms);
  if (set.gemms.empty()) {
    return fail(
        ErrorCode::kInvalidArgument,
        "--set: of none of its {} GEMMs were {:.0f} % of the configurations measured to the "
        "end; measure a set with `float8-tune sweep --exhaustive`",
        set.left_out, 100 * tuner::kExhaustiveShare);
  }
  if (options.recipes.empty()) return set;
  const auto recipes = F8_TRY(recipes_of(options.recipes));
  std::erase_if(set.gemms, [&](const ExhaustiveGemm& gemm) {
    return std::ranges::find(recipes, measured_recipe(gemm)) == recipes.end();
  });
  if (set.gemms.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--recipe {}: the set has no GEMM of it; leave --recipe out, or measure it with "
                "`float8-tune sweep --exhaustive`",
                options.recipes);
  }
  return set;
}

Result<std::map<Group, Scores>> scores_of(const tuner::ExhaustiveSet& set, const Strategy& strategy,
                                          int64_t seeds) {
  std::map<Group, Scores> all;
  for (size_t i = 0; i < set.gemms.size(); ++i) {
    const ExhaustiveGemm& gemm = set.gemms[i];
    Scores scores;
    scores.shapes.insert(gemm.measured.linear);
    scores.gemms = 1;
    for (int64_t seed = 0; seed < seeds; ++seed) {
      const auto searched = F8_TRY(
          tuner::replay(gemm, strategy, static_cast<uint64_t>(seed) * set.gemms.size() + i + 1));
      scores.regrets.push_back(searched.regret);
      scores.gpu_s += searched.gpu_s / static_cast<double>(seeds);
      scores.candidates += static_cast<double>(searched.candidates) / static_cast<double>(seeds);
    }
    const std::string& device = gemm.measured.device_class.name;
    all[{device, measured_recipe(gemm)}].add(scores);
    all[{device, kAllRecipes}].add(scores);
  }
  return all;
}

class ReplayReport {
 public:
  void add(const std::string& strategy, const Group& group, const Scores& scores,
           double exhaustive_s) {
    const double p50 = tuner::median(scores.regrets);
    const double p95 = tuner::percentile(scores.regrets, 0.95);
    const double most = std::ranges::max(scores.regrets);
    const auto gemms = static_cast<double>(scores.gemms);
    Json row = {{"device", group.device},
                {"recipe", group.recipe},
                {"strategy", strategy},
                {"shapes", scores.shapes.size()},
                {"gemms", scores.gemms},
                {"candidates_per_gemm", rounded(scores.candidates / gemms, 3)},
                {"regret_median", rounded(p50, 4)},
                {"regret_p95", rounded(p95, 4)},
                {"regret_max", rounded(most, 4)},
                {"gpu_s", rounded(scores.gpu_s, 4)}};
    const bool measures = scores.gpu_s > 0;
    if (measures) row["exhaustive_over_gpu_s"] = rounded(exhaustive_s / scores.gpu_s, 4);
    json_.push_back(row);
    const auto percent = [](double share) { return f8::format("{:.2f} %", 100 * share); };
    table_.add({group.device, group.recipe, strategy, std::to_string(scores.shapes.size()),
                std::to_string(scores.gemms), f8::format("{:.0f}", scores.candidates / gemms),
                percent(p50), percent(p95), percent(most), f8::format("{:.1f}", scores.gpu_s),
                measures ? f8::format("{:.1f}", exhaustive_s / scores.gpu_s) : "-"});
  }
  void show(const Global& global, size_t left_out) const {
    if (global.json) {
      print_json({{"strategies", json_}, {"gemms_left_out", left_out}});
      return;
    }
    print_styled(table_.text(stdout_color(global)));
    if (left_out > 0) {
      print(f8::format("\n{} GEMMs are left out: too few of their configurations were measured\n",
                       left_out));
    }
  }

 private:
  Json json_ = Json::array();
  Table table_{{{"device", Table::Align::kLeft},
                {"recipe", Table::Align::kLeft},
                {"strategy", Table::Align::kLeft},
                {"shapes"},
                {"GEMMs"},
                {"measured"},
                {"regret"},
                {"p95"},
                {"max"},
                {"GPU s"},
                {"times less than exhaustive"}}};
};

Result<int> replay(const ReplayOptions& options, const Global& global) {
  const std::vector<Strategy> strategies = F8_TRY(strategies_of(options));
  const tuner::ExhaustiveSet set = F8_TRY(set_of(options));
  const Strategy exhaustive = F8_TRY(tuner::find_strategy("exhaustive", options.measuring));
  std::vector<std::map<Group, Scores>> scores;
  Progress progress(global);
  for (const Strategy& strategy : strategies) {
    progress.update(f8::format("replaying {} on {} GEMMs", strategy.name, set.gemms.size()));
    scores.push_back(F8_TRY(scores_of(set, strategy, options.seeds)));
  }
  const auto known = std::ranges::find(strategies, exhaustive.name, &Strategy::name);
  const std::map<Group, Scores> all = known == strategies.end()
                                          ? F8_TRY(scores_of(set, exhaustive, 1))
                                          : scores[static_cast<size_t>(known - strategies.begin())];
  progress.clear();
  ReplayReport report;
  for (const auto& [group, of_exhaustive] : all) {
    for (size_t i = 0; i < strategies.size(); ++i) {
      report.add(strategies[i].name, group, scores[i].at(group), of_exhaustive.gpu_s);
    }
  }
  report.show(global, set.left_out);
  return kExitOk;
}

}  // namespace

void add_replay(CLI::App& app, Program& program) {
  auto options = std::make_shared<ReplayOptions>();
  CLI::App* command = add_command(
      app, program, "replay",
      "what strategies of searching choose and cost, on the times of exhaustive sweeps",
      Needs::kNothing, [options, &program] { return replay(*options, program.global); });
  refuse_db(*command, "replay reads the exhaustive sweeps that --set names");
  command
      ->add_option("--set", options->sets,
                   "what sweep --exhaustive measured: databases, .jsonl exports, separated by "
                   "commas; layers "
                   "that the cost model was fitted to look better than others")
      ->type_name("LIST");
  command
      ->add_option("--strategy", options->strategies,
                   "untuned: the choice without a search; " + std::string(kStrategiesText))
      ->type_name("LIST");
  command->add_flag("--curve", options->curve,
                    "auto with 1, 2, 4, ... configurations too: regret against GPU time");
  command->add_option("--recipe", options->recipes, "these recipes alone, separated by commas")
      ->type_name("LIST");
  add_integer(*command, "--seeds", options->seeds, "how often each search is repeated", 1, 1000);
  declare_figures(*command, options->measuring, true);
}

}  // namespace f8::cli
