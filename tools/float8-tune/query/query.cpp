// query: what the databases know of a problem: the best kernel, the runners-up, and where each
// number comes from. The first database that has measured the problem answers, the user's before
// the built-in.
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <set>

#include "recipes/mlp.hpp"
#include "tools/float8-tune/attention_option.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/device_option.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/problem_option.hpp"
#include "tools/float8-tune/query/query_map.hpp"
#include "tools/float8-tune/trial_json.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::cli {
namespace {

using tuning_db::TrialRow;
using tuning_db::TrialState;

struct QueryOptions {
  std::string mnk;
  std::string recipe;
  std::string op;  // empty: the linear, and its three GEMMs
  GroupOptions groups;
  AttentionOptions attentions;
  std::optional<Problem> whole;  // by its key
  std::string device;
  int64_t limit = 5;
  bool map = false;
};

struct Answer {
  Problem problem;
  std::vector<TrialRow> ok;               // best first, one a candidate
  bool by_linear = false;                 // the first is what the fastest linear took
  std::map<std::string, int64_t> states;  // how many of the other rows are in each state
  std::vector<TrialRow> failed;           // of these, the ones that ended in an error
  std::optional<KernelChoice> neighbour;  // where this shape was not measured
  std::string asked;                      // the device that is asked about
  std::vector<std::string> others;        // other devices that have timed rows of the problem
};

bool is_bf16(const TrialRow& row) {
  return row.candidate.impl == tuning_db::Impl::kBf16 ||
         row.candidate.impl == tuning_db::Impl::kBf16CublasLt;
}

// The best kernel of a GEMM is the one that its fastest linear took, as in the table.
Status put_linears_choice_first(Answer& answer, const tuning_db::Database& database) {
  if (!is_gemm(answer.problem.op)) return {};
  const TuningTable table =
      F8_TRY(database.table(tuning_db::Database::TablePart::kAll, &answer.ok.front().device));
  const auto chosen = std::ranges::find(table.choices(), answer.problem, &KernelChoice::problem);
  if (chosen == table.choices().end()) return {};
  const std::string text =
      f8::format("{} {}", to_string(chosen->kernel.provider), config_text(chosen->kernel));
  const auto own = std::ranges::find_if(
      answer.ok, [&](const TrialRow& row) { return candidate_text(row.candidate) == text; });
  if (own == answer.ok.end() || own == answer.ok.begin()) return {};
  std::rotate(answer.ok.begin(), own, own + 1);
  answer.by_linear = true;
  return {};
}

bool is_timed(const TrialRow& row) {
  return row.result.state == TrialState::kOk && row.result.timing.has_value() &&
         row.fidelity == "final";
}

bool has_failed(const TrialRow& row) {
  constexpr std::array kFailures = {TrialState::kCompileError, TrialState::kLaunchError,
                                    TrialState::kWrong, TrialState::kTimeout,
                                    TrialState::kQuarantined};
  return std::ranges::find(kFailures, row.result.state) != kFailures.end();
}

// The key of the first of these devices on which one of the rows was timed; empty: none was. Only
// devices of this name count, where it is one.
std::string first_device(const std::vector<TrialRow>& rows, const std::vector<DeviceClass>& devices,
                         const std::string& name) {
  for (const DeviceClass& device : devices) {
    if (!name.empty() && device.name != name) continue;
    const std::string key = tuning_db::key(device);
    const bool found = std::ranges::any_of(rows, [&](const TrialRow& row) {
      return is_timed(row) && tuning_db::key(row.device) == key;
    });
    if (found) return key;
  }
  return "";
}

// The devices but this one on which rows of the problem were timed.
Result<std::vector<std::string>> other_devices(const Problem& problem, const Databases& databases,
                                               std::string_view device) {
  std::vector<std::string> others;
  for (const tuning_db::Database& database : databases.owned) {
    for (const TrialRow& row : F8_TRY(database.trials(problem))) {
      const std::string& name = row.device.name;
      if (!is_timed(row) || name == device) continue;
      if (std::ranges::find(others, name) == others.end()) others.push_back(name);
    }
  }
  return others;
}

Result<Answer> ask(const Problem& problem, const Databases& databases, const TuningTable& table,
                   const AskedDevice& asked) {
  const std::string& name = asked.named;
  Answer answer;
  answer.problem = problem;
  answer.asked = asked.name;
  for (const tuning_db::Database& database : databases.owned) {
    std::vector<TrialRow> rows = F8_TRY(database.trials(problem));
    const std::string device =
        first_device(rows, F8_TRY(database.devices(databases.asked(database))), name);
    std::set<std::string> candidates;
    for (TrialRow& row : rows) {
      const bool elsewhere = device.empty() ? !name.empty() && row.device.name != name
                                            : tuning_db::key(row.device) != device;
      if (elsewhere) {
        ++answer.states["on another device"];
      } else if (!is_timed(row)) {
        const std::string state = row.result.state == TrialState::kOk
                                      ? "screened"
                                      : std::string(to_string(row.result.state));
        ++answer.states[state];
        if (has_failed(row)) answer.failed.push_back(std::move(row));
      } else if (candidates.insert(candidate_text(row.candidate)).second) {
        answer.ok.push_back(std::move(row));
      }
    }
    if (answer.ok.empty()) continue;
    F8_TRY(put_linears_choice_first(answer, database));
    answer.others = F8_TRY(other_devices(problem, databases, answer.ok.front().device.name));
    return answer;
  }
  answer.others = F8_TRY(other_devices(problem, databases, answer.asked));
  if (is_gemm(problem.op)) {
    for (const auto& [choice, octaves] : table.neighbours(problem, 1)) answer.neighbour = *choice;
  }
  return answer;
}

Json to_json(const Answer& answer, size_t limit) {
  Json json = problem_json(answer.problem);
  json["best"] = nullptr;
  json["runners_up"] = Json::array();
  json["baseline"] = nullptr;
  for (const TrialRow& row : answer.ok) {
    const Json shown = trial_json(row);
    if (is_bf16(row)) {
      if (json["baseline"].is_null()) json["baseline"] = shown;
    } else if (json["best"].is_null()) {
      json["best"] = shown;
      json["best"]["chosen_by"] = answer.by_linear ? "linear" : "time";
    } else if (json["runners_up"].size() < limit) {
      json["runners_up"].push_back(shown);
    }
  }
  json["other_devices"] = answer.others;
  json["other_trials"] = Json::object();
  for (const auto& [state, count] : answer.states) json["other_trials"][state] = count;
  json["failed"] = Json::array();
  for (const TrialRow& row : answer.failed) {
    if (json["failed"].size() < limit) json["failed"].push_back(trial_json(row));
  }
  if (answer.neighbour) {
    json["nearest_measured"] = {{"problem", answer.neighbour->problem.key()},
                                {"impl", to_string(answer.neighbour->kernel.provider)},
                                {"config", config_text(answer.neighbour->kernel)},
                                {"median_us", rounded(answer.neighbour->median_ns / 1e3)}};
  }
  return json;
}

void print_failed(const Answer& answer, size_t limit) {
  for (size_t i = 0; i < answer.failed.size() && i < limit; ++i) {
    const TrialRow& row = answer.failed[i];
    print(f8::format("  failed: {}: {}: {}\n", candidate_text(row.candidate),
                     tuning_db::to_string(row.result.state), row.result.reason));
  }
  if (answer.failed.size() > limit) {
    print(f8::format("  {} more failed; --limit shows them\n", answer.failed.size() - limit));
  }
}

void print_answer(const Answer& answer, size_t limit, bool color) {
  using enum Table::Align;
  print(answer.problem.key() + "\n");
  if (answer.ok.empty()) {
    print(f8::format("  {}\n", answer.others.empty()
                                   ? "not measured"
                                   : elsewhere_hint(answer.others, answer.asked)));
    print_failed(answer, limit);
    if (answer.neighbour) {
      print(f8::format("  nearest: {}  {} {}  {}\n", answer.neighbour->problem.key(),
                       to_string(answer.neighbour->kernel.provider),
                       config_text(answer.neighbour->kernel),
                       microseconds(answer.neighbour->median_ns)));
    }
    return;
  }
  const std::string& device = answer.ok.front().device.name;
  if (device != answer.asked) {
    print(f8::format("  {}\n", elsewhere_text({device}, answer.asked)));
  }
  Table table({{"kernel", kLeft},
               {"median us"},
               {"95% interval"},
               {"TFLOP/s"},
               {"vs bf16"},
               {"interval"},
               {"measured", kLeft}});
  size_t shown = 0;
  for (const TrialRow& row : answer.ok) {
    if (!is_bf16(row) && shown++ > limit) continue;
    const tuning_db::Timing& t = *row.result.timing;
    const auto& ratio = row.result.ratio;
    table.add({candidate_text(row.candidate), f8::format("{:.2f}", t.median_ns / 1e3),
               f8::format("[{:.2f}, {:.2f}]", t.ci_lo_ns / 1e3, t.ci_hi_ns / 1e3),
               f8::format("{:.1f}", tflops_of(answer.problem, t)),
               ratio ? f8::format("{:.3f}", ratio->ratio) : "-",
               ratio ? f8::format("[{:.3f}, {:.3f}]", ratio->lo, ratio->hi) : "-",
               row.at.substr(0, 10)});
  }
  print_styled(table.text(color));
  if (answer.by_linear) print("  the first is what the fastest linear of this shape took\n");
  for (const TrialRow& row : answer.ok) {
    if (row.result.accuracy.empty()) continue;
    print_styled(accuracy_text(row.result.accuracy, color));
    break;
  }
  print_failed(answer, limit);
  const TrialRow& first = answer.ok.front();
  print(f8::format("  {}; {}; method {}; {}\n", first.device_name, first.toolchain,
                   first.method_key.substr(0, 8), first.layer));
}

// The first op is what an answer is about, the others belong to it.
Result<std::vector<Op>> ops_of(const std::string& text) {
  if (!text.empty()) return std::vector{F8_TRY(of_option("--op", parse_op(text)))};
  std::vector<Op> ops = {Op::kLinear};
  for (const Gemm gemm : kGemms) ops.push_back(to_op(gemm));
  return ops;
}

// Returns the problem that a key names, or those of each attention that is asked for: an answer is about the first
// one, and the others are its parts.
Result<std::vector<std::vector<Problem>>> asked_problems(const QueryOptions& options) {
  std::vector<std::vector<Problem>> all;
  if (options.whole) {
    all.push_back({*options.whole});
    return all;
  }
  std::vector<Op> ops = {Op::kAttention, Op::kAttentionForward, Op::kAttentionBackward};
  if (!options.op.empty()) {
    ops = {F8_TRY(of_option("--op", parse_any_op(options.op)))};
    if (!is_attention(ops.front())) {
      return fail(ErrorCode::kInvalidArgument,
                  "--op {} is of linears, and --shape of attention; give --mnk, or --op "
                  "attention, attention_forward or attention_backward",
                  options.op);
    }
  }
  const std::vector<AttentionRecipe> recipes = F8_TRY(
      attention_recipes_of(options.recipe.empty() ? attention_recipes_text() : options.recipe));
  for (const AttentionShape& shape : F8_TRY(shapes_of(options.attentions))) {
    for (const AttentionRecipe recipe : recipes) {
      std::vector<Problem> problems;
      for (const Op op : ops) {
        // The other recipe has its backward in bf16, which is not float8's.
        if (op == Op::kAttentionBackward && recipe != AttentionRecipe::kFp8) continue;
        problems.push_back(F8_TRY(attention_problem(op, recipe, shape)));
      }
      if (!problems.empty()) all.push_back(std::move(problems));
    }
  }
  if (!all.empty()) return all;
  return fail(ErrorCode::kInvalidArgument,
              "--op {} of recipe {} is in bf16, and not float8's; that of fp8 is in fp8",
              options.op, options.recipe);
}

// Says what measures the problems that were not.
Status note_missing(const std::vector<Problem>& missing, const Global& global) {
  if (missing.empty()) return {};
  if (const Problem& mlp = missing.front(); mlp.op == Op::kMlp) {
    note(global, "it was not measured; on a GPU: {}",
         tuning_db::how_to_measure(F8_TRY(find_recipe(mlp.recipe)), mlp_shape(mlp.dims)));
    return {};
  }
  std::vector<AttentionShape> shapes;
  for (const Problem& problem : missing) shapes.push_back(attention_shape(problem));
  note(global, "not everything here was measured; {}",
       how_to_measure(shapes, database_to_write(global)));
  return {};
}

// Says what rows there are of attention, of which there is no estimate, or of the MLP that a key names.
Result<int> query_rows(const QueryOptions& options, const Global& global) {
  const auto asked = F8_TRY(asked_problems(options));
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table =
      F8_TRY(merged_table(databases, tuning_db::Database::TablePart::kLinears));
  const AskedDevice device = F8_TRY(asked_device(table.devices, options.device));
  const auto limit = static_cast<size_t>(options.limit);
  Json results = Json::array();
  std::vector<Problem> missing;
  for (const std::vector<Problem>& problems : asked) {
    for (const Problem& problem : problems) {
      const Answer answer = F8_TRY(ask(problem, databases, table, device));
      if (answer.ok.empty()) missing.push_back(problem);
      if (!global.json) {
        print_answer(answer, limit, stdout_color(global));
      } else if (problem == problems.front()) {
        results.push_back(to_json(answer, limit));
      } else {
        results.back()["parts"].push_back(to_json(answer, limit));
      }
    }
  }
  if (global.json) print_json({{"results", results}});
  F8_TRY(note_missing(missing, global));
  return kExitOk;
}

Result<int> query(const QueryOptions& options, const Global& global) {
  if (options.whole || !options.attentions.shapes.empty()) return query_rows(options, global);
  F8_TRY(require_problem(options.mnk, options.recipe));
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  const std::vector<Op> ops = F8_TRY(ops_of(options.op));
  const std::vector<Shape> shapes = F8_TRY(shapes_of(options.mnk));
  const Groups groups = F8_TRY(groups_of(options.groups));
  if (options.map && groups.experts > 0) {
    return fail(ErrorCode::kInvalidArgument, "--map has no experts; leave out --experts");
  }
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table = F8_TRY(merged_table(databases));
  const AskedDevice device = F8_TRY(asked_device(table.devices, options.device));
  if (options.map) return print_map(shapes, recipe, table, device.named, global);
  const auto limit = static_cast<size_t>(options.limit);
  Json results = Json::array();
  bool missing = false;
  for (const Shape& shape : shapes) {
    for (const Op op : ops) {
      const Problem problem = F8_TRY(Problem::make(op, recipe, shape, groups));
      const Answer answer = F8_TRY(ask(problem, databases, table, device));
      missing = missing || answer.ok.empty();
      if (!global.json) {
        print_answer(answer, limit, stdout_color(global));
      } else if (op == ops.front()) {
        results.push_back(to_json(answer, limit));
      } else {
        results.back()["gemms"].push_back(to_json(answer, limit));
      }
    }
  }
  if (global.json) print_json({{"results", results}});
  if (missing) {
    note(global,
         "not everything here was measured; on a GPU: float8-tune sweep --mnk \"{}\"{} --recipe {} "
         "--db {}",
         options.mnk,
         groups.experts == 0 ? ""
                             : f8::format(" --experts {} --skew {}", groups.experts, groups.skew),
         recipe.name, database_to_write(global));
  }
  return kExitOk;
}

}  // namespace

void add_query(CLI::App& app, Program& program) {
  auto options = std::make_shared<QueryOptions>();
  CLI::App* command =
      add_command(app, program, "query", "the best known kernel for a shape", Needs::kNothing,
                  [options, &program] { return query(*options, program.global); });
  add_mnk(*command, options->mnk);
  add_recipe(*command, options->recipe);
  command
      ->add_option("--op", options->op,
                   "linear, output, grad_input or grad_weight alone (default: all four); with "
                   "--shape attention, attention_forward or attention_backward")
      ->type_name("OP");
  add_groups(*command, options->groups);
  const AttentionFlags flags = add_attention(*command, options->attentions);
  add_problem(*command, {.mnk = &options->mnk,
                         .recipe = &options->recipe,
                         .op = &options->op,
                         .groups = &options->groups,
                         .whole = &options->whole});
  add_device(*command, options->device);
  add_integer(*command, "--limit", options->limit, "how many runners-up to show", 0, 1000);
  CLI::Option* map =
      command->add_flag("--map", options->map,
                        "a heat map of the linear's speedup over all N and K of --mnk, for one M");
  for (const char* other : {"--mnk", "--experts", "--skew", "--problem"}) {
    flags.shape->excludes(command->get_option(other));
  }
  flags.shape->excludes(map);
  for (CLI::Option* mask : {flags.masks, flags.causal, flags.full}) mask->needs(flags.shape);
}

}  // namespace f8::cli
