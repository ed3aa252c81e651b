// filter: which linears, and layers of experts, of a model to convert to float8, and why.
#include "tuning_db/estimate/filter.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "base/file.hpp"
#include "base/text.hpp"
#include "recipes/model/filter_file.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/device_option.hpp"
#include "tools/float8-tune/filter/attention_rule.hpp"
#include "tools/float8-tune/filter/decision_rows.hpp"
#include "tools/float8-tune/filter/mlp_note.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/trial_json.hpp"

namespace f8::cli {
namespace {

struct FilterCommandOptions {
  ModelOptions model;
  std::string recipe;
  std::string policy = "measured";
  std::string fqns;
  double margin = kFilterMargin;
  std::string device;
  RankOptions ranks;
  std::filesystem::path output;
  std::filesystem::path verdicts;
  bool fuse = false;
  bool attention = false;
  int64_t sequence = 0;  // of --attention; 0: not given
};

// "a,b,auto_filter_small_kn"; an empty name would be part of every layer's name.
Result<std::vector<std::string>> split_names(const std::string& text) {
  if (text.empty()) return std::vector<std::string>{};
  std::vector<std::string> names = split(text, ',');
  if (std::ranges::find(names, "") != names.end()) {
    return fail(ErrorCode::kInvalidArgument,
                "--filter-fqns has an empty name, which would match every layer; remove the comma");
  }
  return names;
}

// A name that keeps nothing is a mistyped one. The layers are shown one for each number.
void note_idle_names(const std::vector<std::string>& names, const tuning_db::FilterResult& result,
                     const Global& global) {
  constexpr size_t kShown = 16;
  std::vector<std::string> layers;
  std::set<std::string> kinds;
  for (const DecisionRow& row : decision_rows(result)) {
    if (kinds.insert(row.name).second) layers.push_back(row.decision->layer.fqn);
  }
  const size_t more = layers.size() > kShown ? layers.size() - kShown : 0;
  layers.resize(layers.size() - more);
  for (const std::string& name : names) {
    const bool keeps =
        name == kAutoFlag || std::ranges::any_of(result.decisions, [&](const auto& d) {
          return d.layer.fqn.find(name) != std::string::npos;
        });
    if (keeps) continue;
    note(global, "--filter-fqns: {} is part of no layer's name, so it keeps none; there are {}{}",
         quote(name), fmt::join(layers, ", "),
         more > 0 ? f8::format(" and {} more, which the table shows", more) : "");
  }
}

// The devices that have rows of the shapes that are decided.
struct RowsByDevice {
  std::string asked;                                 // the device that the decisions are about
  std::map<Shape, std::vector<std::string>> others;  // those that have a row of this shape too
  std::set<Shape> own;                               // shapes that the asked one has
};

// What is decided besides the linears.
struct Beside {
  AskedDevice device;
  RowsByDevice rows;
  std::optional<std::vector<AttentionDecision>> attention;  // none: it is not asked for
};

RowsByDevice rows_by_device(const TuningTable& table, const std::string& recipe,
                            std::string asked) {
  RowsByDevice rows{.asked = std::move(asked), .others = {}, .own = {}};
  for (const LinearSpeedup& row : table.speedups()) {
    if (row.recipe != recipe) continue;
    const std::string& device = table.devices[row.device].name;
    std::vector<std::string>& others = rows.others[row.shape];
    if (device == rows.asked) {
      rows.own.insert(row.shape);
    } else if (std::ranges::find(others, device) == others.end()) {
      others.push_back(device);
    }
  }
  return rows;
}

Shape shape_of(const NamedLinear& layer, int64_t tokens) {
  return {tokens_of(layer, tokens), layer.out_features, layer.in_features};
}

void note_other_devices(const RowsByDevice& rows, const tuning_db::FilterResult& result,
                        int64_t tokens, const Global& global) {
  std::set<Shape> shapes;
  std::vector<std::string> devices;
  size_t elsewhere = 0;
  for (const tuning_db::FilterDecision& d : result.decisions) {
    if (d.layer.is_experts()) continue;
    const Shape shape = shape_of(d.layer, tokens);
    const auto others = rows.others.find(shape);
    if (!shapes.insert(shape).second || others == rows.others.end() || rows.own.contains(shape)) {
      continue;
    }
    ++elsewhere;
    for (const std::string& device : others->second) {
      if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
    }
  }
  if (elsewhere == 0) return;
  note(global, "{} of the {} shapes are {}", elsewhere, shapes.size(),
       elsewhere_hint(devices, rows.asked));
}

Json to_json(const tuning_db::FilterDecision& d, int64_t tokens, const RowsByDevice& rows) {
  Json decision = {{"fqn", d.layer.fqn},
                   {"in_features", d.layer.in_features},
                   {"out_features", d.layer.out_features},
                   {"count", d.layer.count},
                   {"tokens", tokens_of(d.layer, tokens)}};
  add_experts(decision, d);
  add_verdict(decision, d);
  decision["trials"] = d.trial_uuids;
  const auto others = rows.others.find(shape_of(d.layer, tokens));
  const bool none = others == rows.others.end() || d.layer.is_experts();
  decision["other_devices"] = none ? Json::array() : Json(others->second);
  if (d.wire) decision["wire"] = wire_json(*d.wire);
  return decision;
}

// The JSON of all of it, as json_text() would write it. A model may have a million layers, so that
// no more than one decision is kept as a value at a time.
std::string report_text(const FilterCommandOptions& options, const tuning_db::FilterResult& result,
                        const Beside& beside) {
  Json report = {{"recipe", options.recipe},
                 {"policy", options.policy},
                 {"tokens", options.model.tokens},
                 {"device", beside.device.name},
                 {"other_devices", beside.device.others},
                 {"model", options.model.model},
                 {"tp", options.model.tp},
                 {"ep", options.model.ep},
                 {"filter_fqns", options.fqns},
                 {"decisions", Json::array()},
                 {"estimated_model_speedup", rounded(result.estimated_model_speedup)}};
  if (result.wire) report["ranks"] = ranks_json(*result.wire);
  if (beside.attention) {
    report["sequence"] = options.sequence;
    report["attention"] = Json::array();
    for (const AttentionDecision& d : *beside.attention) report["attention"].push_back(to_json(d));
  }
  const std::string frame = json_text(report);
  constexpr std::string_view kEmpty = "\n  \"decisions\": []";  // no string holds a line end
  const size_t at = frame.find(kEmpty) + kEmpty.size() - 1;
  std::string text = frame.substr(0, at);
  const char* separator = "\n    ";
  for (const tuning_db::FilterDecision& d : result.decisions) {
    text += std::exchange(separator, ",\n    ");
    const std::string one = json_text(to_json(d, options.model.tokens, beside.rows));
    std::string_view lines = std::string_view(one).substr(0, one.size() - 1);
    text += take_until(lines, '\n');
    while (!lines.empty()) {
      text += "\n    ";
      text += take_until(lines, '\n');
    }
  }
  return text + "\n  " + frame.substr(at);
}

// The file that a trainer's model conversion reads.
Result<std::string> verdicts_text(const FilterCommandOptions& options,
                                  const tuning_db::FilterResult& result, const Beside& beside) {
  FilterFile file{.recipe = options.recipe, .tokens = options.model.tokens, .decisions = {}};
  for (const tuning_db::FilterDecision& d : result.decisions) {
    file.decisions.push_back({d.layer.fqn,
                              d.layer.in_features,
                              d.layer.out_features,
                              d.convert,
                              d.reason,
                              d.evidence,
                              {d.speedup, d.lo, d.hi}});
  }
  if (beside.attention) {
    file.sequence = options.sequence;
    for (const AttentionDecision& d : *beside.attention) file.attention.push_back(filed(d));
  }
  return file.serialize();
}

void print_table(const FilterCommandOptions& options, const tuning_db::FilterResult& result,
                 const std::string& device, bool color) {
  using enum Table::Align;
  std::vector<Table::Column> columns = {{"layer", kLeft},   {"count"},   {"N"},       {"K"},
                                        {"verdict", kLeft}, {"speedup"}, {"interval"}};
  // An expert sees a part of the tokens, and all together see each as often as it has experts.
  const bool of_experts = std::ranges::any_of(result.decisions, [](const auto& d) {
    return d.layer.tokens_share != 1 || d.layer.is_experts();
  });
  if (of_experts) columns.insert(columns.begin() + 2, {"M"});
  if (result.wire) columns.insert(columns.end(), {{"wire us"}, {"exposed us"}});
  columns.insert(columns.end(), {{"evidence", kLeft}, {"reason", kLeft}});
  Table table(std::move(columns));
  for (const DecisionRow& row : decision_rows(result)) {
    const tuning_db::FilterDecision& d = *row.decision;
    auto [speedup, interval] = speedup_cells(d);
    std::vector<std::string> cells = {row.name,
                                      f8::format("{}", row.count),
                                      f8::format("{}", d.layer.out_features),
                                      f8::format("{}", d.layer.in_features),
                                      d.convert ? "float8" : "keep bf16",
                                      std::move(speedup),
                                      std::move(interval)};
    if (of_experts) {
      cells.insert(cells.begin() + 2, f8::format("{}", tokens_of(d.layer, options.model.tokens)));
    }
    if (result.wire) {
      const auto both = [&](double bf16_us, double fp8_us) {
        return d.wire ? f8::format("{:.1f} -> {:.1f}", bf16_us, fp8_us) : std::string("-");
      };
      const tuning_db::WireShare share = d.wire.value_or(tuning_db::WireShare{});
      cells.push_back(both(share.bf16_us, share.fp8_us));
      cells.push_back(both(share.bf16_exposed_us, share.fp8_exposed_us));
    }
    cells.emplace_back(to_string(d.evidence));
    cells.push_back(d.reason);
    table.add(std::move(cells));
  }
  print_styled(table.text(color));
  print(f8::format("\n{} to float8 ({}, {}, M {}{}); these linears together {:.3f}x\n",
                   count_text(result), options.recipe, options.policy, options.model.tokens,
                   device.empty() ? "" : ", " + device, result.estimated_model_speedup));
  if (!result.wire) return;
  print(f8::format("from bf16 to fp8 on the wire: {} ({})\n", result.wire->describe(),
                   result.wire->model().origin()));
}

// Standard output holds one thing: the table, the JSON, or the file that is named "-".
Status check_outputs(const FilterCommandOptions& options, const Global& global) {
  if (is_standard_stream(options.output) && is_standard_stream(options.verdicts)) {
    return fail(ErrorCode::kInvalidArgument,
                "-o - and --verdicts - both want standard output; name a file for one of them");
  }
  return check_output(global, "--verdicts", options.verdicts);  // -o - is the JSON itself
}

// Prints the answer and writes the files that are asked for.
Status show(const FilterCommandOptions& options, const tuning_db::FilterResult& result,
            const Beside& beside, const Global& global) {
  const bool is_taken = is_standard_stream(options.output) || is_standard_stream(options.verdicts);
  std::string json;
  if (global.json || !options.output.empty()) {
    json = report_text(options, result, beside);
  }
  if (!options.output.empty()) F8_TRY(write_output(global, "-o", options.output, json));
  if (!options.verdicts.empty()) {
    const std::string text =
        F8_TRY(of_option("--verdicts", verdicts_text(options, result, beside)));
    F8_TRY(write_output(global, "--verdicts", options.verdicts, text));
  }
  if (is_taken) return {};
  if (global.json) {
    print_styled(json);
  } else {
    print_table(options, result, beside.device.name, stdout_color(global));
    if (beside.attention) print_styled("\n" + text_of(*beside.attention, stdout_color(global)));
  }
  return {};
}

Result<int> filter(const FilterCommandOptions& options, const Global& global) {
  F8_TRY(check_outputs(options, global));
  if (options.attention != (options.sequence > 0)) {
    return fail(ErrorCode::kInvalidArgument,
                "--attention and --sequence stand together: give {} too",
                options.attention ? "--sequence, the tokens of a sequence," : "--attention");
  }
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  const tuner::Model model = F8_TRY(load(options.model));
  tuning_db::FilterOptions how;
  how.policy = F8_TRY(of_option("--policy", parse_filter_policy(options.policy)));
  how.tokens = options.model.tokens;
  how.filter_fqns = F8_TRY(split_names(options.fqns));
  how.margin = options.margin;
  // The command asks for measured verdicts; torchao's rule has its switch.
  how.automatic = how.policy == FilterPolicy::kMeasured;
  how.parallel = parallelism_of(options.ranks, options.model.tp);
  how.fused_mlps = options.fuse;
  how.wire = F8_TRY(wire_model_of(options.ranks.wire_rows));
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table =
      F8_TRY(merged_table(databases, tuning_db::Database::TablePart::kLinears));
  const AskedDevice device = F8_TRY(asked_device(table.devices, options.device));
  const auto estimator = estimator_of(table, recipe, device.named);
  const auto result = F8_TRY(tuning_db::filter(model.layers, how, estimator));
  Beside beside{
      .device = device, .rows = rows_by_device(table, recipe.name, device.name), .attention = {}};
  if (options.attention) {
    beside.attention = F8_TRY(
        decide_attention({.model = options.model.model,
                          .tp = options.model.tp,
                          .step = {.tokens = options.model.tokens, .sequence = options.sequence},
                          .device = device.name,  // that of the linears
                          .margin = options.margin},
                         databases));
  }
  F8_TRY(show(options, result, beside, global));
  if (device.is_assumed()) note(global, "the answers are for {}", device_text(device));
  note_other_devices(beside.rows, result, how.tokens, global);
  if (options.fuse) note_mlps(table, recipe, device, result.mlps, global);
  note_idle_names(how.filter_fqns, result, global);
  return kExitOk;
}

}  // namespace

void add_filter(CLI::App& app, Program& program) {
  auto options = std::make_shared<FilterCommandOptions>();
  CLI::App* command = add_command(
      app, program, "filter", "which linears and experts of a model to convert, and why",
      Needs::kNothing, [options, &program] { return filter(*options, program.global); });
  const ModelFlags flags = add_model(*command, options->model);
  flags.model->required();
  flags.tokens->required();
  add_model_experts(*command, options->model);
  add_recipe(*command, options->recipe)->required();
  command->add_option(
      "--policy", options->policy,
      "measured, or torchao: its fixed rule, which auto_filter_small_kn in --filter-fqns "
      "switches on as there");
  command
      ->add_option(
          "--filter-fqns", options->fqns,
          "keep layers whose name contains one of these; auto_filter_small_kn switches the "
          "automatic rule of torchao on")
      ->type_name("A,B,...");
  add_margin(*command, options->margin);
  add_fuse(*command, options->fuse);
  command->add_flag("--attention", options->attention,
                    "decide for each layer's attention too, causal, and its recipe, by measured "
                    "rows");
  add_integer(*command, "--sequence", options->sequence, "tokens of a sequence, for --attention");
  add_device(*command, options->device);
  add_ranks(*command, options->ranks);
  add_output(*command, "--verdicts", options->verdicts,
             "for a trainer: also write the filter file that its model conversion loads");
  add_output(*command, "-o,--output", options->output,
             "for people and scripts: also write what --json prints (no trainer loads it)");
}

}  // namespace f8::cli
