// compare: two databases, or two runs, toolchains or devices inside them, problem by problem. It is
// a gate for CI: exit code 3 where anything is slower.
#include "tuning_db/compare/compare.hpp"

#include <algorithm>
#include <array>
#include <memory>

#include "base/file.hpp"
#include "recipes/attention.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/refuse_db.hpp"
#include "tools/float8-tune/trial_json.hpp"
#include "tools/tuner/search/bench/shape_sweep.hpp"

namespace f8::cli {
namespace {

using tuning_db::CompareOptions;
using tuning_db::CompareResult;
using tuning_db::Comparison;
using tuning_db::Database;
using tuning_db::Method;
using tuning_db::Outcome;
using tuning_db::Quantity;
using tuning_db::TrialRow;
namespace fs = std::filesystem;

struct SideOptions {
  fs::path file;
  tuning_db::Selection selection;
  // The file and what is taken of it, which may be all that tells the sides apart.
  [[nodiscard]] std::string name() const {
    std::string text = file.string();
    if (!selection.run.empty()) text += ", run " + selection.run;
    if (!selection.toolchain.empty()) text += ", toolchain " + selection.toolchain;
    if (!selection.device.empty()) text += ", device " + selection.device;
    return text;
  }
};

struct CompareCommandOptions {
  SideOptions a, b;
  std::string recipe;
  std::string op;
  std::optional<Op> only;  // which that names
  std::string by = "time";
  double threshold = 0.02;
  bool all = false;
  bool strict = false;
  fs::path csv;
};

// One side of the comparison: its rows and the methods that its database knows.
struct Side {
  std::string name;
  std::vector<TrialRow> rows;
  std::map<std::string, Method> methods;
};

// The rows that the options leave, of which there must be some.
Result<Side> load_side(const SideOptions& side, const CompareCommandOptions& options, char letter) {
  const Database database = F8_TRY(open_named_database(side.file));
  Side loaded{side.name(), F8_TRY(database.timed()), F8_TRY(database.methods())};
  if (loaded.rows.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "{} has no final measurements, so there is nothing to compare; measure into it "
                "with `float8-tune sweep --db {} ...`",
                side.file.string(), side.file.string());
  }
  std::erase_if(loaded.rows, [&](const TrialRow& row) { return !side.selection.admits(row); });
  if (loaded.rows.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "no measurement of {} has what --run-{}, --toolchain-{} and --device-{} ask; "
                "`float8-tune db info` lists runs and devices",
                side.file.string(), letter, letter, letter);
  }
  std::erase_if(loaded.rows, [&](const TrialRow& row) {
    return (!options.recipe.empty() && row.problem.recipe != options.recipe) ||
           (options.only && row.problem.op != *options.only);
  });
  return loaded;
}

Status check_sides(const CompareCommandOptions& options) {
  std::error_code error;
  const bool same =
      options.a.file == options.b.file || fs::equivalent(options.a.file, options.b.file, error);
  if (!same || !(options.a.selection == options.b.selection)) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{} would be compared with itself; name two databases, or two parts of this one "
              "with --run-a and --run-b (or --toolchain-a, --device-a and so on)",
              options.a.file.string());
}

std::string example(const std::vector<TrialRow>& rows) {
  if (rows.empty()) return "nothing";
  return f8::format("such as {} on {}", rows.front().problem.key(), rows.front().device_name);
}

// The fields that differ between the methods of the first pair that has none in common.
Result<std::string> unlike_text(const CompareResult& result, const Side& a, const Side& b) {
  const tuning_db::UnlikeMethods& first = result.unlike.front();
  std::vector<std::string> fields = F8_TRY(tuning_db::differing_fields(
      a.methods.at(first.a.method_key).spec, b.methods.at(first.b.method_key).spec));
  constexpr size_t kShown = 4;
  const size_t more = fields.size() > kShown ? fields.size() - kShown : 0;
  if (more > 0) fields.resize(kShown);
  std::string text = f8::format("{}", fmt::join(fields, ", "));
  if (more > 0) text += f8::format(" and {} more", more);
  return f8::format(
      "{} problems are measured by unlike methods ({} in {}, {} in {}: {}) and unlike methods are "
      "never compared; sweep one of them again with the options of the other's sweep",
      result.unlike.size(), first.a.method_key.substr(0, 8), a.name,
      first.b.method_key.substr(0, 8), b.name, text);
}

Status check_common(const CompareResult& result, const Side& a, const Side& b) {
  if (!result.compared.empty()) return {};
  if (!result.unlike.empty()) {
    return fail(ErrorCode::kInvalidArgument, "{}", F8_TRY(unlike_text(result, a, b)));
  }
  return fail(ErrorCode::kInvalidArgument,
              "{} and {} have no problem in common ({} has {}, {} has {}); sweep the same shapes "
              "and recipes in both, or name unlike devices with --device-a and --device-b",
              a.name, b.name, a.name, example(result.only_a), b.name, example(result.only_b));
}

Json row_json(const TrialRow& row) {
  Json json = trial_json(row);
  json["provenance"]["power_limit_w"] = row.device.power_limit_w;
  return json;
}

Json keys_json(const std::vector<TrialRow>& rows) {
  Json keys = Json::array();
  for (const TrialRow& row : rows) {
    keys.push_back({{"problem", row.problem.key()}, {"device", row.device_name}});
  }
  return keys;
}

// Under --strict a comparison that decides nothing fails.
bool is_undecided(const CompareResult& result) {
  return result.count(Outcome::kAmbiguous) == result.compared.size();
}

Json to_json(const CompareResult& result, const CompareCommandOptions& options) {
  Json json = {{"a", options.a.file.string()},
               {"b", options.b.file.string()},
               {"a_name", options.a.name()},
               {"b_name", options.b.name()},
               {"by", options.by},
               {"threshold", options.threshold},
               {"undecided", is_undecided(result)},
               {"geometric_mean", rounded(result.geometric_mean)},
               {"counts", Json::object()},
               {"results", Json::array()},
               {"only_a", keys_json(result.only_a)},
               {"only_b", keys_json(result.only_b)},
               {"unlike_methods", Json::array()}};
  for (const Outcome outcome : tuning_db::kOutcomes) {
    json["counts"][std::string(to_string(outcome))] = result.count(outcome);
  }
  for (const Comparison& c : result.compared) {
    Json one = problem_json(c.a.problem);
    one["verdict"] = to_string(c.outcome);
    one["reason"] = c.reason;
    add_interval(one, "ratio", c.ratio, c.lo, c.hi);
    one["a"] = row_json(c.a);
    one["b"] = row_json(c.b);
    json["results"].push_back(std::move(one));
  }
  for (const auto& [a, b] : result.unlike) {
    json["unlike_methods"].push_back({{"problem", a.problem.key()},
                                      {"device", a.device_name},
                                      {"method_a", a.method_key},
                                      {"method_b", b.method_key}});
  }
  return json;
}

std::string shown(const TrialRow& row, Quantity quantity) {
  return quantity == Quantity::kTime ? f8::format("{:.2f}", row.result.timing->median_ns / 1e3)
                                     : f8::format("{:.3f}", row.result.ratio->ratio);
}

void print_text(const CompareResult& result, const CompareCommandOptions& options,
                Quantity quantity, bool color) {
  using enum Table::Align;
  const char* unit = quantity == Quantity::kTime ? "us" : "speedup";
  Table table({{"problem", kLeft},
               {f8::format("A {}", unit)},
               {f8::format("B {}", unit)},
               {"B vs A"},
               {"interval"},
               {"verdict", kLeft},
               {"reason", kLeft}});
  size_t rows = 0;
  for (const Comparison& c : result.compared) {
    if (c.outcome == Outcome::kSame && !options.all) continue;
    ++rows;
    table.add({c.a.problem.key(), shown(c.a, quantity), shown(c.b, quantity),
               f8::format("{:.3f}", c.ratio), interval_text(c.lo, c.hi, 3),
               std::string(to_string(c.outcome)), c.reason});
  }
  print(f8::format("A {}\nB {}\n", options.a.name(), options.b.name()));
  if (rows > 0) print_styled(table.text(color));
  print(f8::format(
      "{} compared: {} FASTER, {} SLOWER, {} SAME (within {:g} %), {} AMBIGUOUS; "
      "geometric mean {:.3f}\n",
      result.compared.size(), result.count(Outcome::kFaster), result.count(Outcome::kSlower),
      result.count(Outcome::kSame), options.threshold * 100, result.count(Outcome::kAmbiguous),
      result.geometric_mean));
  print(f8::format("only in A {}, only in B {}, of unlike methods {}\n", result.only_a.size(),
                   result.only_b.size(), result.unlike.size()));
}

Result<std::string> csv_of(const CompareResult& result, Quantity quantity) {
  constexpr std::array<std::string_view, 14> kColumns = {
      "problem", "op",    "recipe",   "m",        "n",       "k",      "a",
      "b",       "ratio", "ratio_lo", "ratio_hi", "verdict", "reason", "device"};
  tuner::CsvText csv(kColumns);
  const auto size = [](int64_t n) { return n == 0 ? "" : f8::format("{}", n); };  // 0: it has none
  for (const Comparison& c : result.compared) {
    const Problem& p = c.a.problem;
    const Shape s = p.shape();
    const std::vector<std::string> fields = {p.key(),
                                             std::string(to_string(p.op)),
                                             p.recipe,
                                             size(s.m),
                                             size(s.n),
                                             size(s.k),
                                             shown(c.a, quantity),
                                             shown(c.b, quantity),
                                             f8::format("{:.6g}", c.ratio),
                                             f8::format("{:.6g}", c.lo),
                                             f8::format("{:.6g}", c.hi),
                                             std::string(to_string(c.outcome)),
                                             c.reason,
                                             c.b.device_name};
    F8_TRY(csv.add(fields));
  }
  return csv.take();
}

int verdict_of(const CompareResult& result, const CompareCommandOptions& options,
               const Global& global) {
  if (result.count(Outcome::kSlower) > 0) return kExitRegression;
  if (!options.strict || !is_undecided(result)) return kExitOk;
  note(
      global,
      "--strict: all {} problems are AMBIGUOUS (the first: {}); sweep both sides again under equal "
      "conditions, or raise --threshold",
      result.compared.size(), result.compared.front().reason);
  return kExitRegression;
}

Status check_filters(CompareCommandOptions& options) {
  if (!options.op.empty()) options.only = F8_TRY(of_option("--op", parse_any_op(options.op)));
  if (options.recipe.empty()) return {};
  const auto attention = parse_attention_recipe(options.recipe);
  if (options.only && is_attention(*options.only)) F8_TRY(of_option("--recipe", attention));
  if (options.only ? !is_attention(*options.only) : !attention) F8_TRY(recipe_of(options.recipe));
  return {};
}

Result<int> compare(CompareCommandOptions options, const Global& global) {
  F8_TRY(check_filters(options));
  F8_TRY(check_output(global, "--csv", options.csv));
  F8_TRY(check_sides(options));
  const Side a = F8_TRY(load_side(options.a, options, 'a'));
  const Side b = F8_TRY(load_side(options.b, options, 'b'));
  CompareOptions how;
  how.quantity = options.by == "time" ? Quantity::kTime : Quantity::kSpeedup;
  how.threshold = options.threshold;
  how.across_devices = !options.a.selection.device.empty() && !options.b.selection.device.empty();
  const CompareResult result = tuning_db::compare(a.rows, b.rows, how);
  F8_TRY(check_common(result, a, b));
  if (!options.csv.empty()) {
    const std::string rows = F8_TRY(csv_of(result, how.quantity));
    F8_TRY(write_output(global, "--csv", options.csv, rows));
  }
  if (global.json) {
    print_json(to_json(result, options));
  } else if (!is_standard_stream(options.csv)) {
    print_text(result, options, how.quantity, stdout_color(global));
  }
  if (!result.unlike.empty()) note_line(global, F8_TRY(unlike_text(result, a, b)));
  return verdict_of(result, options, global);
}

void add_side(CLI::App& command, SideOptions& side, const std::string& letter) {
  command.add_option("--run-" + letter, side.selection.run, "only the run whose uuid begins so")
      ->type_name("UUID");
  command
      .add_option("--toolchain-" + letter, side.selection.toolchain,
                  "only toolchains whose description holds this, e.g. a revision or \"CUDA 13.0\"")
      ->type_name("TEXT");
  command
      .add_option("--device-" + letter, side.selection.device,
                  "only devices whose name holds this; with both, unlike devices are compared")
      ->type_name("TEXT");
}

}  // namespace

void add_compare(CLI::App& app, Program& program) {
  auto options = std::make_shared<CompareCommandOptions>();
  CLI::App* command = add_command(
      app, program, "compare", "is B faster than A, problem by problem? exit code 3 if slower",
      Needs::kNothing, [options, &program] { return compare(*options, program.global); });
  refuse_db(*command, "compare takes both databases as arguments: `float8-tune compare A B`");
  command->add_option("a", options->a.file, "the database before; built-in is the one that ships")
      ->required()
      ->type_name("FILE");
  command->add_option("b", options->b.file, "the database after")->required()->type_name("FILE");
  add_side(*command, options->a, "a");
  add_side(*command, options->b, "b");
  add_recipe(*command, options->recipe);
  command
      ->add_option("--op", options->op,
                   "rows of one operation: linear, output, grad_input, grad_weight, experts, "
                   "attention, attention_forward, attention_backward")
      ->type_name("OP");
  command
      ->add_option("--by", options->by,
                   "time of the fastest kernel, or speedup of the linears against bf16, which "
                   "depends less on the clock")
      ->check(CLI::IsMember({"time", "speedup"}));
  add_share(*command, "--threshold", options->threshold, "what differs by less is the SAME");
  command->add_flag("--all", options->all, "list the problems that are the SAME too");
  command->add_flag("--strict", options->strict,
                    "fail too where all are AMBIGUOUS: a gate that decided nothing");
  add_output(*command, "--csv", options->csv, "also write the rows as CSV");
  command->footer(
      "A problem's verdict is FASTER, SLOWER or SAME where the whole interval of the ratio says "
      "so, else AMBIGUOUS with the reason. Exit code: 3 with any SLOWER, and under --strict where "
      "all are "
      "AMBIGUOUS; 1 for bad input, else 0.");
}

}  // namespace f8::cli
