#include "tools/float8-tune/filter/attention_rule.hpp"

#include <algorithm>
#include <array>
#include <map>

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

const tuning_db::Accuracy* find(const std::vector<tuning_db::Accuracy>& accuracy,
                                std::string_view data, std::string_view tensor) {
  const auto found = std::ranges::find_if(
      accuracy, [&](const auto& a) { return a.data == data && a.tensor == tensor; });
  return found == accuracy.end() ? nullptr : &*found;
}

// Names the tensor that is out of the budget by most, or that is not known; empty where all are in it.
std::string out_of_budget(const std::vector<tuning_db::Accuracy>& accuracy) {
  std::string worst;
  double most = 0;
  for (const std::string_view data : tuner::kAttentionData) {
    for (const Budget& budget : kBudgets) {
      const auto* found = find(accuracy, data, budget.tensor);
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

// The newest row that decides, in the first database that has one, and the other devices that have some.
struct Deciding {
  std::optional<TrialRow> row;
  std::vector<std::string> others;
};
// `asked` empty: of any device.
Result<Deciding> deciding_row(const Problem& problem, const Databases& databases,
                              const std::string& asked) {
  Deciding found;
  for (const tuning_db::Database& database : databases.owned) {
    for (TrialRow& row : F8_TRY(database.trials(problem))) {
      if (!decides(row)) continue;
      if (!asked.empty() && row.device.name != asked) {
        if (std::ranges::find(found.others, row.device.name) == found.others.end()) {
          found.others.push_back(row.device.name);
        }
      } else if (!found.row || row.at > found.row->at) {
        found.row = std::move(row);
      }
    }
    if (found.row) break;
  }
  return found;
}

Verdict verdict_of(const Problem& problem, const Deciding& deciding, const std::string& asked,
                   double margin) {
  if (!deciding.row) {
    return {false, deciding.others.empty()
                       ? "kept in bf16: it was not measured; " + how_to_measure(problem)
                       : "kept in bf16: " + elsewhere_hint(deciding.others, asked)};
  }
  const TrialRow& row = *deciding.row;
  const std::string basis = f8::format("measured on {}, {}", row.device.name, row.at.substr(0, 10));
  const std::string inaccurate = out_of_budget(row.result.accuracy);
  if (!inaccurate.empty()) return {false, f8::format("{}; {}", inaccurate, basis)};
  const tuning_db::Ratio& ratio = *row.result.ratio;
  return speedup_verdict({ratio.ratio, ratio.lo, ratio.hi}, margin, basis);
}

void add_verdict(Json& json, const AttentionVerdict& of) {
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
void add_verdicts(Json& json, const AttentionVerdicts& recipes) {
  add_verdict(json, recipes.front());
  if (!recipes.front().verdict.convert) json["recipe"] = bf16_recipe().name;
  for (const AttentionVerdict& each : recipes) {
    add_verdict(json["recipes"].emplace_back(Json::object()), each);
  }
}

}  // namespace

std::string how_to_measure(const Problem& attention) {
  return f8::format(
      "on a GPU: benchmarks/pytorch/attention.py --shapes {} --masks {} --jsonl rows.jsonl, then "
      "float8-tune db import rows.jsonl --db FILE",
      to_string(attention.dims, std::span(kAttentionDims).first<5>()),
      mask_name(attention_shape(attention).causal));
}

Result<AttentionVerdicts> attention_verdicts(const AttentionShape& shape,
                                             const Databases& databases, const std::string& device,
                                             double margin) {
  std::string asked = asked_device(device, "");
  AttentionVerdicts recipes;
  std::string newest;
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    const Problem problem = F8_TRY(attention_problem(Op::kAttention, recipe, shape));
    recipes.push_back({.problem = problem, .verdict = {}, .row = {}});
  }
  if (asked.empty()) {
    for (const AttentionVerdict& each : recipes) {
      const Deciding deciding = F8_TRY(deciding_row(each.problem, databases, ""));
      if (!deciding.row || deciding.row->at <= newest) continue;
      newest = deciding.row->at;
      asked = deciding.row->device.name;
    }
  }
  for (AttentionVerdict& each : recipes) {
    Deciding deciding = F8_TRY(deciding_row(each.problem, databases, asked));
    each.verdict = verdict_of(each.problem, deciding, asked, margin);
    each.row = std::move(deciding.row);
  }
  std::ranges::stable_sort(recipes, std::greater<>(), [](const AttentionVerdict& each) {
    return std::pair(each.verdict.convert, each.row ? each.row->result.ratio->lo : 0);
  });
  return recipes;
}

std::string accuracy_text(const std::vector<tuning_db::Accuracy>& accuracy, bool color) {
  std::vector<std::string> kinds, tensors;
  const auto keep = [](std::vector<std::string>& names, const std::string& name) {
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  };
  for (const tuning_db::Accuracy& a : accuracy) {
    keep(kinds, a.data);
    keep(tensors, a.tensor);
  }
  std::vector<Table::Column> columns = {{"SQNR in dB", Table::Align::kLeft}};
  for (const std::string& tensor : tensors) columns.push_back({tensor});
  Table table(std::move(columns));
  for (const std::string& kind : kinds) {
    std::vector<std::string> cells = {kind};
    for (const std::string& tensor : tensors) {
      const auto* found = find(accuracy, kind, tensor);
      cells.push_back(found == nullptr ? "-" : f8::format("{:.1f}", found->sqnr_db));
    }
    table.add(cells);
  }
  return table.text(color);
}

Result<int> explain_attention(const Problem& problem, const std::string& device, double margin,
                              const Global& global) {
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table =
      F8_TRY(merged_table(databases, tuning_db::Database::TablePart::kLinears));
  const std::string asked = F8_TRY(device_named(table.devices, device));
  // A forward or a backward by itself decides nothing.
  const AttentionVerdicts recipes =
      F8_TRY(attention_verdicts(attention_shape(problem), databases, asked, margin));
  const AttentionVerdict& best = recipes.front();
  if (global.json) {
    Json json = problem_json(best.problem);
    add_verdicts(json, recipes);
    json["needed"] = rounded(1 + margin);
    json["trials"] = Json::array();
    for (const AttentionVerdict& each : recipes) {
      if (each.row) json["trials"].push_back(trial_json(*each.row));
    }
    print_json(json);
    return kExitOk;
  }
  print(f8::format(
      "attention {}  ->  {}\n"
      "  needs        a speedup of more than {:.3f}, and SQNR of {:.0f} dB of O and dV, {:.0f} dB "
      "of dQ and dK, on all data\n",
      to_string(problem.dims, kAttentionDims),
      best.verdict.convert ? "FLOAT8, recipe " + best.problem.recipe : "KEEP BF16", 1 + margin,
      kLeastOfValues, kLeastOfScores));
  for (const AttentionVerdict& each : recipes) {
    print(f8::format("  {:<11}  {}\n", each.problem.recipe, each.verdict.reason));
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
  if (asked.tokens % asked.sequence != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "--tokens {} are no whole sequences of --sequence {}; correct one of them",
                asked.tokens, asked.sequence);
  }
  std::vector<AttentionDecision> decisions;
  std::map<std::string, AttentionVerdicts> known;  // the layers of a model are mostly alike
  for (tuner::AttentionLayer& layer :
       F8_TRY(of_option("--attention", tuner::load_attention(asked.model, asked.tp)))) {
    AttentionDecision& decision = decisions.emplace_back();
    if (layer.kept.empty() && layer.window > 0 && layer.window < asked.sequence) {
      layer.kept = f8::format("windows of {} keys are not measured", layer.window);
    }
    const AttentionShape shape{.tokens = asked.sequence,
                               .batch = asked.tokens / asked.sequence,
                               .heads_q = layer.heads_q,
                               .heads_kv = layer.heads_kv,
                               .head_dim = layer.head_dim};
    const auto problem = attention_problem(Op::kAttention, kAttentionRecipes.front(), shape);
    if (layer.kept.empty() && !problem) layer.kept = problem.error().message;
    if (!layer.kept.empty()) {
      decision.verdict.reason = "kept in bf16: " + layer.kept;
    } else {
      if (!known.contains(problem->key())) {
        known[problem->key()] =
            F8_TRY(attention_verdicts(shape, databases, asked.device, asked.margin));
      }
      decision.recipes = known[problem->key()];
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
  if (!decision.recipes.empty()) add_verdicts(json, decision.recipes);
  return json;
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
