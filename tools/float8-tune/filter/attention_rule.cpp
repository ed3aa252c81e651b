#include "tools/float8-tune/filter/attention_rule.hpp"

#include <algorithm>
#include <array>

#include "base/text.hpp"
#include "tools/float8-tune/device_option.hpp"
#include "tools/float8-tune/filter/decision_rows.hpp"
#include "tools/float8-tune/trial_json.hpp"
#include "tools/tuner/backend/attention_data.hpp"

namespace f8::cli {
namespace {

using tuning_db::TrialRow;

// The budget of accuracy on each kind of data: least SQNR in dB.
constexpr double kLeastOfValues = 20, kLeastOfScores = 18;
struct Budget {
  std::string_view tensor;
  double least_db;
};
constexpr std::array kBudgets = {Budget{"O", kLeastOfValues}, Budget{"dQ", kLeastOfScores},
                                 Budget{"dK", kLeastOfScores}, Budget{"dV", kLeastOfValues}};

// Names the tensor that is out of the budget by most, or that is not known; empty where all are in it.
std::string out_of_budget(const std::vector<tuning_db::Accuracy>& accuracy) {
  std::string worst;
  double most = 0;
  for (const std::string_view data : tuner::kAttentionData) {
    for (const Budget& budget : kBudgets) {
      const auto* found = find_accuracy(accuracy, data, budget.tensor);
      if (found == nullptr) {
        return f8::format("accuracy not known: {} on {} data", budget.tensor, data);
      }
      if (budget.least_db - found->sqnr_db <= most) continue;
      most = budget.least_db - found->sqnr_db;
      worst = f8::format("too inaccurate: {} {:.1f} dB on {}, need {:.0f} dB", budget.tensor,
                         found->sqnr_db, data, budget.least_db);
    }
  }
  return worst;
}

bool decides(const TrialRow& row) {
  return row.candidate.impl == tuning_db::Impl::kFloat8 && row.fidelity == "final" &&
         row.result.state == tuning_db::TrialState::kOk && row.result.ratio.has_value();
}

// The rows of a problem that decide, by database in the order in which they are asked.
using DecidingRows = std::vector<std::vector<TrialRow>>;
Result<DecidingRows> deciding_rows(const Problem& problem, const Databases& databases) {
  DecidingRows rows;
  for (const tuning_db::Database& database : databases.owned) {
    rows.push_back(F8_TRY(database.trials(problem)));
    std::erase_if(rows.back(), [](const TrialRow& row) { return !decides(row); });
  }
  return rows;
}

// The newest row of the first database that has one of the device; null: there is none.
const TrialRow* newest_row(const DecidingRows& rows, const std::string& device) {
  const TrialRow* newest = nullptr;
  for (const std::vector<TrialRow>& of_database : rows) {
    for (const TrialRow& row : of_database) {
      if (row.device.name != device) continue;
      if (newest == nullptr || row.at > newest->at) newest = &row;
    }
    if (newest != nullptr) break;
  }
  return newest;
}

std::vector<std::string> devices_of(const DecidingRows& rows) {
  std::vector<std::string> devices;
  for (const std::vector<TrialRow>& of_database : rows) {
    for (const TrialRow& row : of_database) {
      if (std::ranges::find(devices, row.device.name) == devices.end()) {
        devices.push_back(row.device.name);
      }
    }
  }
  return devices;
}

Verdict verdict_of(const Problem& problem, const DecidingRows& rows, const TrialRow* own,
                   const std::string& asked, double margin) {
  if (own == nullptr) {
    const std::vector<std::string> others = devices_of(rows);
    return {false, "kept in bf16: " +
                       (others.empty()
                            ? "it was not measured; " + how_to_measure({attention_shape(problem)})
                            : elsewhere_hint(others, asked))};
  }
  const TrialRow& row = *own;
  const std::string basis = f8::format("measured on {}, {}", row.device.name, row.at.substr(0, 10));
  const std::string inaccurate = out_of_budget(row.result.accuracy);
  if (!inaccurate.empty()) return {false, f8::format("{}; {}", inaccurate, basis)};
  const tuning_db::Ratio& ratio = *row.result.ratio;
  return speedup_verdict({ratio.ratio, ratio.lo, ratio.hi}, margin, basis);
}

void add_recipe_verdict(Json& json, const AttentionVerdict& of) {
  json["problem"] = of.problem.key();
  json["recipe"] = of.problem.recipe;
  json["convert"] = of.verdict.convert;
  json["reason"] = of.verdict.reason;
  json["speedup_known"] = of.row.has_value();
  if (!of.row) return;
  const tuning_db::Ratio& ratio = *of.row->result.ratio;
  add_interval(json, "speedup", ratio.ratio, ratio.lo, ratio.hi);
  json["accuracy"] = accuracy_json(of.row->result.accuracy);
  json["trial"] = of.row->uuid;
  json["device"] = of.row->device.name;
}

// The best recipe's verdict, whose recipe is bf16 where it is not converted, and that of each.
void add_recipe_verdicts(Json& json, const AttentionVerdicts& recipes) {
  add_recipe_verdict(json, recipes.front());
  if (!recipes.front().verdict.convert) json["recipe"] = bf16_recipe().name;
  for (const AttentionVerdict& each : recipes) {
    add_recipe_verdict(json["recipes"].emplace_back(Json::object()), each);
  }
}

}  // namespace

Result<AttentionVerdicts> attention_verdicts(const AttentionShape& shape,
                                             const Databases& databases, const std::string& device,
                                             double margin) {
  AttentionVerdicts recipes;
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    const Problem problem = F8_TRY(attention_problem(Op::kAttention, recipe, shape));
    const DecidingRows rows = F8_TRY(deciding_rows(problem, databases));
    const TrialRow* own = newest_row(rows, device);
    recipes.push_back(
        {.problem = problem, .verdict = verdict_of(problem, rows, own, device, margin), .row = {}});
    if (own != nullptr) recipes.back().row = *own;
  }
  std::ranges::stable_sort(recipes, std::greater<>(), [](const AttentionVerdict& each) {
    return std::pair(each.verdict.convert, each.row ? each.row->result.ratio->lo : 0);
  });
  return recipes;
}

// The recipe's forward and its backward by themselves on a device, where they were measured.
static Result<std::vector<TrialRow>> parts_of(const Problem& attention, const Databases& databases,
                                              const std::string& device) {
  std::vector<TrialRow> parts;
  for (const Op op : {Op::kAttentionForward, Op::kAttentionBackward}) {
    const auto part =
        attention_problem(op, attention_recipe(attention), attention_shape(attention));
    if (!part) continue;  // a backward in bf16 is not float8's
    const auto counts = [&](const TrialRow& row) {
      return row.candidate.impl == tuning_db::Impl::kFloat8 && row.fidelity == "final" &&
             row.result.state == tuning_db::TrialState::kOk && row.result.timing &&
             row.device.name == device;
    };
    for (const tuning_db::Database& database : databases.owned) {
      std::vector<TrialRow> rows = F8_TRY(database.trials(*part));  // best first
      const auto best = std::ranges::find_if(rows, counts);
      if (best == rows.end()) continue;
      parts.push_back(std::move(*best));
      break;
    }
  }
  return parts;
}

Result<int> explain_attention(const Problem& problem, const std::string& device, double margin,
                              const Global& global) {
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table =
      F8_TRY(merged_table(databases, tuning_db::Database::TablePart::kLinears));
  const AskedDevice asked = F8_TRY(asked_device(table.devices, device));
  // A forward or a backward by itself decides nothing.
  const AttentionVerdicts recipes =
      F8_TRY(attention_verdicts(attention_shape(problem), databases, asked.name, margin));
  const AttentionVerdict& best = recipes.front();
  std::vector<std::vector<TrialRow>> parts;
  for (const AttentionVerdict& each : recipes) {
    parts.push_back(F8_TRY(parts_of(each.problem, databases, asked.name)));
  }
  if (global.json) {
    Json json = problem_json(best.problem);
    add_recipe_verdicts(json, recipes);
    add_asked_device(json, asked);
    json["needed"] = rounded(1 + margin);
    json["trials"] = Json::array();
    for (const AttentionVerdict& each : recipes) {
      if (each.row) json["trials"].push_back(trial_json(*each.row));
    }
    for (size_t i = 0; i < recipes.size(); ++i) {
      Json& of_recipe = json["recipes"][i]["parts"] = Json::object();
      for (const TrialRow& row : parts[i]) {
        of_recipe[std::string(to_string(row.problem.op))] = trial_json(row);
      }
    }
    print_json(json);
    return kExitOk;
  }
  print(f8::format(
      "attention {}  ->  {}\n"
      "  device       {}\n"
      "  needs        a speedup of more than {:.3f}, and SQNR of {:.0f} dB of O and dV, {:.0f} dB "
      "of dQ and dK, on all data\n",
      to_string(problem.dims, kAttentionDims),
      best.verdict.convert ? "FLOAT8, recipe " + best.problem.recipe : "KEEP BF16",
      device_text(asked), 1 + margin, kLeastOfValues, kLeastOfScores));
  for (size_t i = 0; i < recipes.size(); ++i) {
    const AttentionVerdict& each = recipes[i];
    print(f8::format("  {:<11}  {}\n", each.problem.recipe, each.verdict.reason));
    for (const TrialRow& row : parts[i]) {
      print(f8::format("  {:<11}  {}, {:.0f} TFLOP/s, by itself\n",
                       row.problem.op == Op::kAttentionForward ? "forward" : "backward",
                       microseconds(row.result.timing->median_ns),
                       tflops_of(row.problem, *row.result.timing)));
    }
    if (!each.row) continue;
    const tuning_db::Ratio& ratio = *each.row->result.ratio;
    print(f8::format("  speedup      {:.3f} {} forward + backward\n", ratio.ratio,
                     interval_text(ratio.lo, ratio.hi, 3)));
    print_styled(accuracy_text(each.row->result.accuracy, stdout_color(global)));
  }
  return kExitOk;
}

Result<std::vector<AttentionDecision>> decide_attention(const AttentionQuestion& asked,
                                                        const Databases& databases) {
  std::vector<AttentionDecision> decisions;
  std::vector<std::pair<AttentionShape, AttentionVerdicts>> known;  // layers are mostly alike
  for (auto& [layer, shape] : F8_TRY(attention_of(asked.model, asked.tp, asked.step))) {
    AttentionDecision& decision = decisions.emplace_back();
    if (!layer.kept.empty()) {
      decision.verdict.reason = "kept in bf16: " + layer.kept;
    } else {
      auto found = std::ranges::find(known, shape, &decltype(known)::value_type::first);
      if (found == known.end()) {
        known.emplace_back(
            shape, F8_TRY(attention_verdicts(shape, databases, asked.device, asked.margin)));
        found = std::prev(known.end());
      }
      decision.recipes = found->second;
      decision.verdict = decision.recipes.front().verdict;
    }
    decision.layer = std::move(layer);
  }
  return decisions;
}

Json to_json(const AttentionDecision& decision) {
  const tuner::AttentionLayer& layer = decision.layer;
  Json json = {{"fqn", layer.fqn},           {"heads_q", layer.heads_q},
               {"heads_kv", layer.heads_kv}, {"head_dim", layer.head_dim},
               {"problem", nullptr},         {"recipe", bf16_recipe().name},
               {"convert", false},           {"reason", decision.verdict.reason},
               {"speedup_known", false},     {"recipes", Json::array()}};
  if (!decision.recipes.empty()) add_recipe_verdicts(json, decision.recipes);
  return json;
}

FilterFile::Attention filed(const AttentionDecision& decision) {
  const tuner::AttentionLayer& layer = decision.layer;
  FilterFile::Attention filed{.fqn = layer.fqn,
                              .heads_q = layer.heads_q,
                              .heads_kv = layer.heads_kv,
                              .head_dim = layer.head_dim,
                              .recipe = bf16_recipe().name,
                              .reason = decision.verdict.reason};
  if (decision.recipes.empty()) return filed;
  const AttentionVerdict& best = decision.recipes.front();
  if (decision.verdict.convert) filed.recipe = best.problem.recipe;
  if (best.row) {
    const tuning_db::Ratio& ratio = *best.row->result.ratio;
    filed.evidence = Evidence::kMeasured;
    filed.speedup = {ratio.ratio, ratio.lo, ratio.hi};
  }
  return filed;
}

std::string text_of(const std::vector<AttentionDecision>& decisions, bool color) {
  using enum Table::Align;
  Table table({{"attention", kLeft},
               {"count"},
               {"heads", kLeft},
               {"verdict", kLeft},
               {"speedup"},
               {"interval"},
               {"reason", kLeft}});
  int64_t converted = 0;
  for (size_t i = 0; i < decisions.size();) {
    const auto& [layer, recipes, verdict] = decisions[i];
    const size_t first = i;
    while (i < decisions.size() && decisions[i].verdict.reason == verdict.reason) ++i;
    const TrialRow* row = recipes.empty() || !recipes.front().row ? nullptr : &*recipes.front().row;
    if (verdict.convert) converted += static_cast<int64_t>(i - first);
    table.add({pattern_of(layer.fqn), f8::format("{}", i - first),
               f8::format("{}/{} of {}", layer.heads_q, layer.heads_kv, layer.head_dim),
               verdict.convert ? "float8 " + recipes.front().problem.recipe : "keep bf16",
               row ? f8::format("{:.3f}", row->result.ratio->ratio) : "-",
               row ? interval_text(row->result.ratio->lo, row->result.ratio->hi, 3) : "-",
               verdict.reason});
  }
  return f8::format("{}{} of {} attentions to float8\n", table.text(color), converted,
                    decisions.size());
}

}  // namespace f8::cli
