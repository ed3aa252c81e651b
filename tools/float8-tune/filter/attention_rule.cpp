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

}  // namespace

std::string how_to_measure(const Problem& attention) {
  return f8::format(
      "on a GPU: benchmarks/pytorch/attention.py --shapes {} --masks {} --jsonl rows.jsonl, then "
      "float8-tune db import rows.jsonl --db FILE",
      to_string(attention.dims, std::span(kAttentionDims).first<5>()),
      mask_name(attention_shape(attention).causal));
}

Result<AttentionVerdict> attention_verdict(const Problem& problem, const Databases& databases,
                                           const std::string& device, double margin) {
  AttentionVerdict answer{.problem = problem, .verdict = {}, .row = {}};
  const std::string asked = asked_device(device, "");
  std::vector<std::string> others;
  for (const tuning_db::Database& database : databases.owned) {
    for (TrialRow& row : F8_TRY(database.trials(problem))) {
      if (!decides(row)) continue;
      if (!asked.empty() && row.device.name != asked) {
        if (std::ranges::find(others, row.device.name) == others.end()) {
          others.push_back(row.device.name);
        }
      } else if (!answer.row || row.at > answer.row->at) {
        answer.row = std::move(row);
      }
    }
    if (answer.row) break;
  }
  if (!answer.row) {
    answer.verdict.reason = others.empty()
                                ? "kept in bf16: it was not measured; " + how_to_measure(problem)
                                : "kept in bf16: " + elsewhere_hint(others, asked);
    return answer;
  }
  const tuning_db::Ratio& ratio = *answer.row->result.ratio;
  const std::string basis =
      f8::format("measured on {}, {}", answer.row->device.name, answer.row->at.substr(0, 10));
  answer.verdict = speedup_verdict({ratio.ratio, ratio.lo, ratio.hi}, margin, basis);
  const std::string inaccurate = out_of_budget(answer.row->result.accuracy);
  if (inaccurate.empty()) return answer;
  answer.verdict = {false, f8::format("{}; {}", inaccurate, basis)};
  return answer;
}

void add_verdict(Json& json, const AttentionVerdict& of) {
  json["problem"] = of.problem ? Json(of.problem->key()) : Json();
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

Result<int> explain_attention(Problem problem, const std::string& device, double margin,
                              const Global& global) {
  problem.op = Op::kAttention;  // a forward by itself decides nothing
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table =
      F8_TRY(merged_table(databases, tuning_db::Database::TablePart::kLinears));
  const std::string asked = F8_TRY(device_named(table.devices, device));
  const AttentionVerdict of = F8_TRY(attention_verdict(problem, databases, asked, margin));
  if (global.json) {
    Json json = problem_json(problem);
    add_verdict(json, of);
    json["needed"] = rounded(1 + margin);
    json["trials"] = of.row ? Json::array({trial_json(*of.row)}) : Json::array();
    print_json(json);
    return kExitOk;
  }
  print(f8::format("{}  ->  {}\n  why          {}\n", problem.key(),
                   of.verdict.convert ? "FLOAT8" : "KEEP BF16", of.verdict.reason));
  if (!of.row) return kExitOk;
  const tuning_db::Ratio& ratio = *of.row->result.ratio;
  print(f8::format(
      "  speedup      {:.3f} {} forward + backward, needs more than {:.3f}\n"
      "  accuracy     needs {:.0f} dB of O and dV, {:.0f} dB of dQ and dK, on all data\n",
      ratio.ratio, interval_text(ratio.lo, ratio.hi, 3), 1 + margin, kLeastOfValues,
      kLeastOfScores));
  print_styled(accuracy_text(of.row->result.accuracy, stdout_color(global)));
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
  std::map<std::string, AttentionVerdict> known;  // the layers of a model are mostly alike
  for (tuner::AttentionLayer& layer :
       F8_TRY(of_option("--attention", tuner::load_attention(asked.model, asked.tp)))) {
    AttentionVerdict of;
    if (layer.kept.empty() && layer.window > 0 && layer.window < asked.sequence) {
      layer.kept = f8::format("windows of {} keys are not measured", layer.window);
    }
    const auto problem = attention_problem(Op::kAttention, {.tokens = asked.sequence,
                                                            .batch = asked.tokens / asked.sequence,
                                                            .heads_q = layer.heads_q,
                                                            .heads_kv = layer.heads_kv,
                                                            .head_dim = layer.head_dim});
    if (!layer.kept.empty() || !problem) {
      of.verdict.reason = "kept in bf16: " + (problem ? layer.kept : problem.error().message);
    } else if (const auto found = known.find(problem->key()); found != known.end()) {
      of = found->second;
    } else {
      of = F8_TRY(attention_verdict(*problem, databases, asked.device, asked.margin));
      known[problem->key()] = of;
    }
    decisions.push_back({std::move(layer), std::move(of)});
  }
  return decisions;
}

Json to_json(const AttentionDecision& decision) {
  const tuner::AttentionLayer& layer = decision.layer;
  Json json = {{"fqn", layer.fqn},
               {"heads_q", layer.heads_q},
               {"heads_kv", layer.heads_kv},
               {"head_dim", layer.head_dim}};
  add_verdict(json, decision.of);
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
    const auto& [layer, of] = decisions[i];
    const size_t first = i;
    while (i < decisions.size() && decisions[i].of.verdict.reason == of.verdict.reason) ++i;
    const auto& row = of.row;
    if (of.verdict.convert) converted += static_cast<int64_t>(i - first);
    table.add({pattern_of(layer.fqn), f8::format("{}", i - first),
               f8::format("{}/{} of {}", layer.heads_q, layer.heads_kv, layer.head_dim),
               of.verdict.convert ? "float8" : "keep bf16",
               row ? f8::format("{:.3f}", row->result.ratio->ratio) : "-",
               row ? interval_text(row->result.ratio->lo, row->result.ratio->hi, 3) : "-",
               of.verdict.reason});
  }
  return f8::format("{}{} of {} attentions to float8\n", table.text(color), converted,
                    decisions.size());
}

}  // namespace f8::cli
