// explain: why one layer is converted or kept: the measurement or the model behind the verdict, the
// three GEMMs' kernels, what torchao's rule says, and which sizes nearby would flip it; where ranks
// share the model, what they send for it in place of these sizes.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>

#include "base/text.hpp"
#include "recipes/mlp.hpp"
#include "recipes/model/filter_file.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/device_option.hpp"
#include "tools/float8-tune/filter/attention_rule.hpp"
#include "tools/float8-tune/filter/decision_rows.hpp"
#include "tools/float8-tune/filter/kernels_of.hpp"
#include "tools/float8-tune/filter/mlp_note.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/problem_option.hpp"
#include "tools/float8-tune/trial_json.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::cli {
namespace {

using tuning_db::FilterDecision;

struct ExplainOptions {
  std::string subject;
  ModelOptions model;
  RankOptions ranks;
  std::string recipe;
  std::string device;
  double margin = 0.02;
  bool fuse = false;
  std::optional<Problem> whole;      // where the subject is an expert linear or an MLP
  std::optional<Problem> attention;  // where it is one
};

struct Subject {
  NamedLinear layer;
  int64_t tokens = 0;
};
// A layer by itself, and its place in the model that it is of; a shape is a model of one layer.
struct Question {
  Subject subject;
  std::vector<NamedLinear> model;
  size_t place = 0;
  int64_t model_tokens = 0;
};

bool looks_like_shape(const std::string& text) {
  return text.find(',') != std::string::npos || parse_dims(text);
}

// A problem key as the subject stands for its linear and its recipe.
Result<ExplainOptions> resolved(ExplainOptions options) {
  if (options.subject.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "explain takes a layer, such as layers.0.attention.wk with --model and --tokens, "
                "or a shape M,N,K, or a problem key");
  }
  if (options.model.model.empty() && options.subject.find('/') != std::string::npos) {
    const Problem problem = F8_TRY(parse_problem(options.subject));
    if (is_attention(problem.op)) {
      options.attention = problem;
      return options;
    }
    if (!options.recipe.empty() && options.recipe != problem.recipe) {
      return fail(ErrorCode::kInvalidArgument,
                  "--recipe is {}, and the problem is of recipe {}; leave --recipe out",
                  options.recipe, problem.recipe);
    }
    if (problem.groups().experts > 0 || problem.op == Op::kMlp) options.whole = problem;
    options.subject = to_string(problem.shape());
    options.recipe = problem.recipe;
  }
  if (options.recipe.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--recipe is required, unless the subject is a problem key");
  }
  return options;
}

// The kinds of a model's layers, in words.
std::string kinds_of(const std::vector<NamedLinear>& layers) {
  constexpr size_t kMost = 8;
  std::set<std::string> seen;
  std::string text;
  for (const NamedLinear& layer : layers) {
    const std::string kind = pattern_of(layer.fqn);
    if (!seen.insert(kind).second) continue;
    if (seen.size() > kMost) return text + ", ...";
    text += (text.empty() ? "" : ", ") + quote(kind);
  }
  return text;
}

Result<Question> find_question(const ExplainOptions& options) {
  if (looks_like_shape(options.subject)) {
    const auto dims = parse_dims(options.subject);
    const auto shapes =
        dims ? std::vector{*dims} : F8_TRY(of_option("shape", parse_shapes(options.subject)));
    if (shapes.size() != 1) {
      return fail(ErrorCode::kInvalidArgument, "{} names {} shapes; explain takes one",
                  quote(options.subject), shapes.size());
    }
    const Shape s = shapes.front();
    const NamedLinear layer = {to_string(s), s.k, s.n};
    return Question{{layer, s.m}, {layer}, 0, s.m};
  }
  const bool no_model = options.model.model.empty();
  const bool no_tokens = options.model.tokens == 0;
  if (no_model || no_tokens) {
    return fail(ErrorCode::kInvalidArgument,
                "to explain the layer {} give {}{}{}, or give a shape M,N,K or a problem key",
                quote(options.subject), no_model ? "--model" : "",
                no_model && no_tokens ? " and " : "", no_tokens ? "--tokens" : "");
  }
  tuner::Model model = F8_TRY(load(options.model));
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const NamedLinear& layer = model.layers[i];
    if (layer.fqn == options.subject || fits_pattern(layer.fqn, options.subject) ||
        fits_pattern(options.subject, layer.fqn)) {
      Subject subject{layer, tokens_of(layer, options.model.tokens)};
      subject.layer.tokens_share = 1;  // its tokens are its own
      return Question{std::move(subject), std::move(model.layers), i, options.model.tokens};
    }
  }
  return fail(ErrorCode::kNotFound, "{} has no linear named {}; its layers are {}", model.name,
              quote(options.subject), kinds_of(model.layers));
}

// Asks the filter for one layer of the given sizes.
struct Asker {
  const tuning_db::Estimator& estimator;
  tuning_db::FilterOptions how;

  [[nodiscard]] Result<FilterDecision> ask(const NamedLinear& layer, int64_t tokens,
                                           FilterPolicy policy) const {
    tuning_db::FilterOptions options = how;
    options.policy = policy;
    options.tokens = tokens;
    auto result = F8_TRY(tuning_db::filter(std::span(&layer, 1), options, estimator));
    return std::move(result.decisions.front());
  }
};

struct Flip {
  char dimension;
  int64_t value;
  SpeedupInterval speedup;
  bool convert = false;  // the verdict there
  bool measured = false;
};

int64_t round_16(double value) {
  return std::max<int64_t>(16, static_cast<int64_t>(std::llround(value / 16)) * 16);
}

int64_t& size_of(Subject& subject, char dimension) {
  return dimension == 'm'   ? subject.tokens
         : dimension == 'n' ? subject.layer.out_features
                            : subject.layer.in_features;
}

// The size of a dimension nearest to the subject's at which the verdict is another: the first step of
// 2^(1/4), up to 16-fold either way, and then halving what is between, by multiples of 16. A
// measured size between may differ again.
Result<std::optional<Flip>> find_flip(const Asker& asker, Subject subject, char dimension,
                                      bool convert) {
  constexpr int kSteps = 16;
  const int64_t own = size_of(subject, dimension);
  const auto decide = [&](int64_t value) {
    size_of(subject, dimension) = value;
    return asker.ask(subject.layer, subject.tokens, FilterPolicy::kMeasured);
  };
  for (int step = 1; step <= 2 * kSteps; ++step) {
    const double octaves = (step % 2 == 1 ? 1 : -1) * ((step + 1) / 2) / 4.0;
    int64_t there = std::min(round_16(static_cast<double>(own) * std::exp2(octaves)), kMaxDim);
    FilterDecision other = F8_TRY(decide(there));
    if (other.convert == convert) continue;
    const double before = octaves - std::copysign(0.25, octaves);
    int64_t here = round_16(static_cast<double>(own) * std::exp2(before));
    while (std::abs(there - here) > 16) {
      const int64_t middle = round_16(static_cast<double>(here + there) / 2);
      const FilterDecision d = F8_TRY(decide(middle));
      if (d.convert == convert) {
        here = middle;
      } else {
        there = middle;
        other = d;
      }
    }
    return Flip{dimension,
                there,
                {other.speedup, other.lo, other.hi},
                other.convert,
                other.evidence == Evidence::kMeasured};
  }
  return std::nullopt;
}

Result<std::vector<Flip>> find_flips(const Asker& asker, const Subject& subject, bool convert) {
  std::vector<Flip> flips;
  for (const char dimension : {'m', 'n', 'k'}) {
    if (const auto flip = F8_TRY(find_flip(asker, subject, dimension, convert))) {
      flips.push_back(*flip);
    }
  }
  return flips;
}

Result<std::vector<tuning_db::TrialRow>> evidence_of(const Databases& databases,
                                                     const FilterDecision& decision,
                                                     const Recipe& recipe) {
  std::vector<tuning_db::TrialRow> rows;
  for (const tuning_db::Database& database : databases.owned) {
    for (const Op op : {Op::kLinear, Op::kExperts, Op::kMlp}) {
      const auto linears = F8_TRY(database.linears(recipe.name, tuning_db::Impl::kFloat8, op));
      for (const tuning_db::TrialRow& row : linears) {
        if (std::ranges::find(decision.trial_uuids, row.uuid) != decision.trial_uuids.end()) {
          rows.push_back(row);
        }
      }
    }
  }
  return rows;
}

// Everything that the two forms of the answer show.
struct Explanation {
  std::optional<Problem> whole;  // of an expert linear or an MLP
  int64_t tokens = 0;
  std::string recipe;
  AskedDevice device;
  double needed = 1;
  FilterDecision decision;
  std::optional<tuning_db::WireCost> wire;  // of ranks that share the model
  tuning_db::MlpCounts mlps;                // of the model, with --fuse
  std::optional<bool> torchao_converts;     // empty: torchao has no rule for this recipe
  std::string torchao_reason;
  std::vector<Kernel> kernels;
  std::vector<Flip> flips;
  std::vector<tuning_db::TrialRow> trials;
};

Json to_json(const Explanation& e) {
  const FilterDecision& d = e.decision;
  Json json = {{"fqn", d.layer.fqn},
               {"m", e.tokens},
               {"n", d.layer.out_features},
               {"k", d.layer.in_features},
               {"recipe", e.recipe}};
  add_asked_device(json, e.device);
  if (e.whole) add_groups(json, *e.whole);
  add_experts(json, d);
  add_verdict(json, d);
  json["interval_terms"] = {{"rows", rounded(d.terms.rows, 4)},
                            {"shape", rounded(d.terms.shape, 4)},
                            {"device", rounded(d.terms.device, 4)},
                            {"toolchain", rounded(d.terms.toolchain, 4)}};
  json["needed"] = rounded(e.needed);
  if (d.wire) json["wire"] = wire_json(*d.wire);
  if (e.wire) json["ranks"] = ranks_json(*e.wire);
  json["torchao"] = {{"convert", e.torchao_converts ? Json(*e.torchao_converts) : Json()},
                     {"reason", e.torchao_reason}};
  for (const char* list : {"kernels", "flips", "trials"}) json[list] = Json::array();
  for (const Kernel& k : e.kernels) {
    json["kernels"].push_back({{"op", k.op}, {"choice", k.choice}, {"chosen_by", k.by}});
  }
  for (const Flip& f : e.flips) {
    Json flip = {{"dimension", std::string(1, f.dimension)},
                 {"value", f.value},
                 {"convert", f.convert},
                 {"measured", f.measured}};
    add_interval(flip, "speedup", f.speedup.speedup, f.speedup.lo, f.speedup.hi);
    json["flips"].push_back(flip);
  }
  for (const auto& row : e.trials) json["trials"].push_back(trial_json(row));
  return json;
}

// A line of the answer; the labels are a column.
void print_line(std::string_view label, std::string_view text) {
  print(f8::format("  {:<11}  {}\n", label, text));
}

std::string speedup_text(double speedup, double lo, double hi) {
  return f8::format("{:.3f} {}", speedup, interval_text(lo, hi, 3));
}

// By how much each cause may make the speedup wrong; they do not add up, their squares do.
std::string terms_text(const tuning_db::IntervalTerms& terms) {
  const auto percent = [](double log) { return f8::format("{:.1f} %", 100 * std::expm1(log)); };
  std::string text = "give or take " + percent(terms.rows) + " of the rows";
  if (terms.shape > 0) text += ", " + percent(terms.shape) + " since they are of other shapes";
  if (terms.device > 0) text += ", " + percent(terms.device) + " since of another device";
  if (terms.toolchain > 0) text += ", " + percent(terms.toolchain) + " since by another toolchain";
  return text;
}

// What the verdict is at a flip. Few measurements make a wide interval, which alone may keep bf16.
std::string flip_text(const Flip& f, double needed) {
  const bool unknown = !f.convert && !f.measured && f.speedup.speedup > needed;
  return f8::format("{} = {}, {}{}: speedup {}", f.dimension, f.value,
                    f.convert ? "to float8" : "to bf16",
                    unknown ? ", for want of measurements" : "",
                    speedup_text(f.speedup.speedup, f.speedup.lo, f.speedup.hi));
}

std::string sizes_text(const Explanation& e) {
  const NamedLinear& layer = e.decision.layer;
  if (!layer.is_experts()) {
    return f8::format("m={} n={} k={}", e.tokens, layer.out_features, layer.in_features);
  }
  return f8::format("experts={} rows={} dim={} hidden_dim={} skew={}", layer.groups.experts,
                    e.tokens, layer.in_features, layer.out_features, layer.groups.skew);
}

void print_text(const Explanation& e) {
  const FilterDecision& d = e.decision;
  print(f8::format("{}  {}  {}  ->  {}  (evidence: {})\n", d.layer.fqn, sizes_text(e), e.recipe,
                   d.convert ? "FLOAT8" : "KEEP BF16", to_string(d.evidence)));
  print_line("device", device_text(e.device));
  print_line("why", d.reason);
  if (d.has_estimate()) {
    print_line("speedup", f8::format("{} forward + backward, needs more than {:.3f}",
                                     speedup_text(d.speedup, d.lo, d.hi), e.needed));
    print_line("interval", terms_text(d.terms));
  }
  if (e.wire) print_line("wire", e.wire->describe());
  print_line("torchao", e.torchao_reason);
  for (const Kernel& k : e.kernels) print_line(k.op, f8::format("{} (by {})", k.choice, k.by));
  for (const Flip& f : e.flips) print_line("flips at", flip_text(f, e.needed));
  for (const auto& row : e.trials) {
    const auto& ratio = row.result.ratio;
    print_line("trial", f8::format("{}  {}  {}, {}{}", row.uuid.substr(0, 8), row.problem.key(),
                                   row.device_name, row.at.substr(0, 10),
                                   ratio ? ", " + speedup_text(ratio->ratio, ratio->lo, ratio->hi)
                                         : std::string()));
  }
}

int show(const Explanation& e, const Global& global) {
  if (global.json) {
    print_json(to_json(e));
  } else {
    print_text(e);
  }
  return kExitOk;
}

// The decision where others than the layer count: what ranks send for it depends on the model, and with --fuse the
// linears of its MLP have its verdict.
Status decide_in_model(const Question& question, tuning_db::FilterOptions how,
                       const tuning_db::Estimator& estimator, Explanation& e) {
  how.tokens = question.model_tokens;
  auto result = F8_TRY(tuning_db::filter(question.model, how, estimator));
  e.decision = std::move(result.decisions[question.place]);
  e.wire = std::move(result.wire);
  e.mlps = result.mlps;
  return {};
}

// The measurements, first those of the device that is asked about: a table's kernels are of its first device.
Result<TuningTable> table_of(const Databases& databases, const std::string& part,
                             AskedDevice& asked) {
  TuningTable table = F8_TRY(merged_table(databases));
  asked = F8_TRY(asked_device(table.devices, part));
  const auto named = std::ranges::find(table.devices, asked.named, &DeviceClass::name);
  if (named == table.devices.end()) return table;
  return merged_table(databases, tuning_db::Database::TablePart::kAll, &*named);
}

constexpr const char* kNoRuleOfExperts = "torchao has no rule for experts";

// An expert linear by itself, where the filter decides for both of a layer; or an MLP, whose linears have verdicts of
// their own without `--fuse`.
Result<Explanation> of_whole(const Problem& asked, const Databases& databases,
                             const ExplainOptions& options) {
  const Recipe recipe = F8_TRY(find_recipe(asked.recipe));
  const Shape s = asked.shape();
  Explanation e;
  const TuningTable table = F8_TRY(table_of(databases, options.device, e.device));
  const bool is_mlp = asked.op == Op::kMlp;
  e.whole = F8_TRY(is_mlp ? Problem::make(Op::kMlp, recipe, asked.dims)
                          : Problem::make(Op::kLinear, recipe, s, asked.groups()));
  e.tokens = s.m;
  e.recipe = recipe.name;
  e.needed = 1 + options.margin;
  e.torchao_reason = is_mlp ? "torchao has no rule for MLPs" : kNoRuleOfExperts;
  FilterDecision& d = e.decision;
  d.layer = {to_string(e.whole->dims, spec_of(e.whole->op).dims), s.k, s.n};
  const auto linears = estimator_of(table, recipe, e.device.named);
  const auto estimator = is_mlp ? linears.of_mlps(mlp_shape(asked.dims).gate, asked.groups())
                                : linears.of_experts(asked.groups());
  const std::string how = is_mlp
                              ? tuning_db::how_to_measure(recipe, mlp_shape(asked.dims))
                              : tuning_db::how_to_measure(recipe, std::span(&s, 1), asked.groups());
  if (const auto known = estimator.estimate(s)) {
    d.evidence = known->evidence;
    d.speedup = known->speedup;
    d.lo = known->lo;
    d.hi = known->hi;
    d.terms = known->terms;
    for (const LinearSpeedup* row : known->rows) d.trial_uuids.push_back(row->trial);
    const std::string more = d.evidence == Evidence::kMeasured ? "" : "; " + how;
    Verdict verdict = speedup_verdict({d.speedup, d.lo, d.hi}, options.margin, known->basis + more);
    d.convert = verdict.convert;
    d.reason = std::move(verdict.reason);
  } else {
    const auto& rows = is_mlp ? table.mlps() : table.experts();
    const std::vector<std::string> devices =
        devices_with(table, rows, [&](const LinearSpeedup& row) {
          return row.recipe == recipe.name && row.groups == asked.groups() &&
                 (!is_mlp || row.gate == mlp_shape(asked.dims).gate);
        });
    d.reason = f8::format(
        "kept in bf16: it was not measured{}; {}",
        devices.empty() ? "" : "; others like it were " + elsewhere_hint(devices, e.device.name),
        how);
  }
  if (!is_mlp) F8_TRY(add_grouped_kernels(recipe, s, asked.groups(), table, "", e.kernels));
  e.trials = F8_TRY(evidence_of(databases, d, recipe));
  return e;
}

Result<int> explain(const ExplainOptions& given, const Global& global) {
  const ExplainOptions options = F8_TRY(resolved(given));
  if (options.attention) {
    return explain_attention(*options.attention, options.device, options.margin, global);
  }
  if (options.whole) {
    const Databases databases = F8_TRY(open_databases(global));
    return show(F8_TRY(of_whole(*options.whole, databases, options)), global);
  }
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  const Question question = F8_TRY(find_question(options));
  const Subject& subject = question.subject;
  const Databases databases = F8_TRY(open_databases(global));
  Explanation e;
  const TuningTable table = F8_TRY(table_of(databases, options.device, e.device));
  const auto estimator = estimator_of(table, recipe, e.device.named);
  tuning_db::FilterOptions how;
  how.margin = options.margin;
  how.automatic = true;
  const Asker asker = {estimator, how};
  e.tokens = subject.tokens;
  e.recipe = recipe.name;
  e.needed = 1 + options.margin;
  how.parallel = parallelism_of(options.ranks, options.model.tp);
  how.fused_mlps = options.fuse;
  if (how.parallel.is_given()) how.wire = F8_TRY(wire_model_of(options.ranks.wire_rows));
  if (how.parallel.is_given() || how.fused_mlps) {
    F8_TRY(decide_in_model(question, how, estimator, e));
  } else {
    e.decision = F8_TRY(asker.ask(subject.layer, subject.tokens, FilterPolicy::kMeasured));
    e.flips = F8_TRY(find_flips(asker, subject, e.decision.convert));
  }
  if (subject.layer.is_experts()) {
    e.torchao_reason = kNoRuleOfExperts;
  } else if (const auto torchao =
                 asker.ask(subject.layer, subject.tokens, FilterPolicy::kTorchao)) {
    e.torchao_converts = torchao->convert;
    e.torchao_reason = torchao->reason;
  } else {
    e.torchao_reason = torchao.error().message;
  }
  e.kernels = F8_TRY(kernels_of(recipe, subject.layer, subject.tokens, table));
  e.trials = F8_TRY(evidence_of(databases, e.decision, recipe));
  const int code = show(e, global);
  if (options.fuse) note_mlps(table, recipe, e.device, e.mlps, global);
  return code;
}

}  // namespace

void add_explain(CLI::App& app, Program& program) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* command =
      add_command(app, program, "explain", "why a layer is converted or kept", Needs::kNothing,
                  [options, &program] { return explain(*options, program.global); });
  command
      ->add_option("subject", options->subject,
                   "a layer's name, M,N,K, or a problem as query and compare print it")
      ->type_name("FQN|M,N,K|KEY");
  add_model(*command, options->model);
  add_model_experts(*command, options->model);
  add_ranks(*command, options->ranks);
  add_recipe(*command, options->recipe);
  add_device(*command, options->device);
  add_margin(*command, options->margin);
  add_fuse(*command, options->fuse);
}

}  // namespace f8::cli
