#include "tools/float8-tune/sweep/sweep_args.hpp"

#include <algorithm>
#include <set>

#include "base/number.hpp"
#include "base/text.hpp"
#include "recipes/mlp.hpp"
#include "recipes/model/model_mlps.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/problem_option.hpp"
#include "tuning_db/json/json_text.hpp"

namespace f8::cli {
namespace {

std::optional<double> parse_number(std::string_view text) {
  const auto value = number_of<double>(text);
  return value && *value >= 0 && *value <= 1e12 ? value : std::nullopt;
}

constexpr const char* kUsualRecipes = "tensorwise,rowwise";

// Of half-widths. One of 0 would never be reached, and wider than this one says nothing.
constexpr ShareLimits kHalfWidths = {.least = 1e-6, .most = 0.1};

struct Number {
  const char* name;
  double tuner::SweepOptions::*value;
  const char* description;
  bool of_gemms = true;  // false: of whole linears, or of a device
  bool is_half_width = false;
};
struct Count {
  const char* name;
  int tuner::SweepOptions::*value;
  const char* description;
  bool of_gemms = true;  // false: of whole linears, or of a device
};
constexpr Number kNumbers[] = {
    {"--screen-ms", &tuner::SweepOptions::screen_ms, "a candidate's share of its GEMM's screening"},
    {"--screen-drop", &tuner::SweepOptions::screen_drop,
     "a candidate this much slower than the fastest leaves the screening"},
    {"--final-ms", &tuner::SweepOptions::final_ms, "a finalist's share of its GEMM's final"},
    {"--gemm-max-ci", &tuner::SweepOptions::gemm_max_ci,
     "a finalist whose interval has a wider half is noisy", true, true},
    {"--linear-min-ms", &tuner::SweepOptions::linear_min_ms,
     "at least so long for a linear and its bf16 baseline, or for an operation of attention",
     false},
    {"--linear-max-ms", &tuner::SweepOptions::linear_max_ms,
     "at most so long for a linear and its bf16 baseline, or for an operation of attention", false},
    {"--linear-ms", &tuner::SweepOptions::linear_ms,
     "the share of each combination of kernels that is timed as a whole linear", false},
    {"--linear-within", &tuner::SweepOptions::linear_within,
     "kernels this much slower than their GEMM's fastest take part in whole linears"},
    {"--batch-us", &tuner::SweepOptions::batch_us, "least length of a GEMM's timed batch"},
    {"--linear-batch-us", &tuner::SweepOptions::linear_batch_us,
     "least length of a timed batch of a linear or of attention", false},
    {"--warm-s", &tuner::SweepOptions::warm_s, "longest warm-up of a thermal block", false},
};
constexpr Count kCounts[] = {
    {"--keep", &tuner::SweepOptions::keep, "generated configurations measured for each GEMM"},
    {"--heuristics", &tuner::SweepOptions::heuristics, "suggestions of cuBLASLt measured"},
    {"--finalists", &tuner::SweepOptions::finalists, "candidates in a GEMM's final"},
    {"--linears", &tuner::SweepOptions::linears,
     "combinations of kernels that are timed as whole linears", false},
    {"--retry-noisy", &tuner::SweepOptions::retry_noisy,
     "more attempts at a noisy linear, or operation of attention", false},
};

}  // namespace

void declare(CLI::App& command, SweepArgs& args) {
  CLI::Option* mnk = add_mnk(command, args.mnk);
  mnk->description(mnk->get_description() +
                   "; and e128m65536n1536k2048skew0 of the linears of 128 experts");
  add_groups(command, args.groups);
  command
      .add_option(
          "--mlp", args.mlp,
          "measure MLPs as float8.torch.fuse runs them, of N hidden and K other features, and "
          "their linears where these were not measured: gated, as SwiGLU's, or plain. With "
          "--model its MLPs are added to its linears, gated or plain as they are")
      ->check(CLI::IsMember({"gated", "plain"}))
      ->type_name("KIND");
  add_model(command, args.model);
  add_model_ranks(command, args.model);
  command
      .add_option("--recipe", args.recipes,
                  "recipes, separated by commas; of attention " + attention_recipes_text())
      ->default_str(kUsualRecipes)
      ->type_name("LIST");
  add_problem(
      command,
      {.mnk = &args.mnk, .recipe = &args.recipes, .groups = &args.groups, .whole = &args.part});
  command
      .add_option(
          "--max-ci", args.max_ci,
          "a linear's ratio, or attention's time, is measured until the half-width of its interval "
          "is below; 0.5%, or 0.005 as a fraction")
      ->type_name("SHARE");
  add_integer(command, "--seed", args.seed, "seed of the order of measuring", 0);
  command.add_flag("--no-pruned-rows", args.no_pruned_rows,
                   "keep no row for configurations that the cost model ruled out");
  command.add_flag("--exhaustive", args.exhaustive,
                   "measure every configuration to the end: what searches and the cost model are "
                   "judged by");
  // Declared before the figures, which thereby overrule those of a strategy.
  command
      .add_option_function<std::string>(
          "--strategy",
          [&args](const std::string& name) {
            (void)tuner::apply_strategy(name, args.options);  // known: see the check
          },
          "how a GEMM's kernel is looked for: " + std::string(kStrategiesText))
      ->default_str("auto")
      ->check(CLI::IsMember(tuner::kStrategies))
      ->type_name("STRATEGY");
  add_conditions(command, args.options.conditions);
  declare_attention(command, args);
  declare_figures(command, args.options, false);
}

void declare_figures(CLI::App& command, tuner::SweepOptions& options, bool gemms_alone) {
  for (const Number& number : kNumbers) {
    if (gemms_alone && !number.of_gemms) continue;
    CLI::Option* option =
        number.is_half_width
            ? add_share(command, number.name, options.*number.value, number.description,
                        kHalfWidths)
            : command.add_option(number.name, options.*number.value, number.description)
                  ->check(CLI::PositiveNumber)
                  ->type_name("NUMBER");
    option->group("Measuring");
  }
  for (const Count& count : kCounts) {
    if (gemms_alone && !count.of_gemms) continue;
    command.add_option(count.name, options.*count.value, count.description)
        ->check(CLI::Range(0, 1000))
        ->type_name("COUNT")
        ->group("Measuring");
  }
}

namespace {

// Adds those of --mnk. A shape that names its experts, as errors and plans print it, has these; one that names
// its gate is an MLP.
Status add_listed(const std::string& mnk, const Groups& groups, tuner::SweepRequest& request) {
  std::vector<tuner::SweptShape>& all = request.shapes;
  if (mnk.empty()) return {};
  std::vector<std::string> others;
  for (const std::string& item : split(mnk, ';')) {
    if (item.starts_with('m')) {
      request.mlps.push_back(
          mlp_shape(F8_TRY(of_option("--mnk", parse_dims(item, spec_of(Op::kMlp).dims)))));
      continue;
    }
    if (!item.starts_with('e')) {
      others.push_back(item);
      continue;
    }
    const auto [e, m, n, k, skew, none] =
        F8_TRY(of_option("--mnk", parse_dims(item, spec_of(Op::kExperts).dims))).sizes;
    all.push_back({{m, n, k}, {.experts = e, .skew = skew}});
  }
  if (others.empty()) return {};
  for (const Shape shape : F8_TRY(shapes_of(f8::format("{}", fmt::join(others, ";"))))) {
    all.push_back({shape, groups});
  }
  return {};
}

Result<tuner::Model> model_of(ModelOptions options, const GroupOptions& groups) {
  if (options.tokens < 1) {
    return fail(ErrorCode::kInvalidArgument, "--model needs --tokens: the M of its linears");
  }
  options.skew = groups.skew;
  return load(options);
}

// The MLPs of a model that can be float8, also those of experts.
std::vector<MlpShape> mlps_of_model(const tuner::Model& model, int64_t tokens) {
  std::vector<MlpShape> all;
  for (const NamedLinear& layer : model.layers) {
    if (!layer.is_experts() || !layer.kept.empty()) continue;
    all.push_back(
        {{tokens_of(layer, tokens), layer.out_features, layer.in_features}, true, layer.groups});
  }
  for (const ModelMlp& mlp : mlps_of(model.layers)) {
    const NamedLinear& first = model.layers[mlp.linears.front()];
    if (!first.kept.empty()) continue;
    all.push_back({{tokens_of(first, tokens), mlp.hidden, mlp.features}, mlp.gate, {}});
  }
  return all;
}

// The linears of a model that can be float8, and the two expert linears of each layer of experts.
Result<std::vector<tuner::SweptShape>> shapes_of_model(const tuner::Model& model,
                                                       const ModelOptions& options) {
  std::vector<tuner::SweptShape> all;
  for (const NamedLinear& layer : model.layers) {
    if (!layer.kept.empty()) continue;  // it stays bf16 under every policy
    const int64_t rows = tokens_of(layer, options.tokens);
    if (!layer.is_experts()) {
      all.push_back({{rows, layer.out_features, layer.in_features}});
      continue;
    }
    for (const ExpertLinear& part : expert_linears(layer, rows)) {
      all.push_back({part.shape, layer.groups});
    }
  }
  std::erase_if(all, [](const tuner::SweptShape& shape) { return !validate_shape(shape); });
  if (all.empty()) {
    return fail(
        ErrorCode::kInvalidArgument,
        "--model {}: no linear has sizes that are multiples of 16, so none can be float8 and "
        "there is nothing to measure; name another model or --tp",
        options.model);
  }
  return all;
}

// Makes the shapes that are listed those of MLPs.
Status take_mlps(const SweepArgs& args, tuner::SweepRequest& request) {
  for (const tuner::SweptShape& shape : request.shapes) {
    const MlpShape mlp{shape, args.mlp == "gated", shape.groups};
    if (!mlp.gate && mlp.groups.experts > 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "--mlp plain is not of experts, which have a gate: give --mlp gated");
    }
    request.mlps.push_back(mlp);
  }
  request.shapes.clear();
  return {};
}

Status check_recipes_of_mlps(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const Recipe recipe = F8_TRY(find_recipe(name));
    for (const Gemm gemm : kGemms) {
      if (recipe.at(gemm).is_fp8()) continue;
      return fail(
          ErrorCode::kUnsupported,
          "recipe {}: MLPs are not fused under it, since its {} reads high precision; leave "
          "--mlp out, or name other recipes",
          name, to_string(gemm));
    }
  }
  return {};
}

template <class T>
void drop_repeated(std::vector<T>& items) {
  std::set<T> seen;
  std::erase_if(items, [&](const T& item) { return !seen.insert(item).second; });
}

}  // namespace

Result<tuner::SweepRequest> request_of(const SweepArgs& args) {
  tuner::SweepRequest request;
  request.options = args.options;
  request.options.max_ci = F8_TRY(of_option("--max-ci", parse_share(args.max_ci, kHalfWidths)));
  request.seed = static_cast<uint64_t>(args.seed);
  if (args.exhaustive) {
    F8_TRY(tuner::apply_strategy("exhaustive", request.options));
    request.options.screen_ms = 1;
  }
  if (args.attention || (args.part && is_attention(args.part->op))) {
    request.attention = F8_TRY(attention_request_of(args));
    return request;
  }
  request.record_pruned = !args.no_pruned_rows;
  request.recipes = F8_TRY(recipes_of(args.recipes.empty() ? kUsualRecipes : args.recipes));
  const bool of_model = !args.model.model.empty();
  if (args.groups.experts > 0 && of_model) {
    return fail(ErrorCode::kInvalidArgument,
                "--experts and --model are both given: the shapes of experts are those of --mnk");
  }
  if (args.part) {
    request.mlps = {mlp_shape(args.part->dims)};
    request.recipes = {args.part->recipe};
  } else if (args.mnk.empty() && !of_model) {
    return fail(ErrorCode::kInvalidArgument,
                "no shapes: give --mnk M,N,K[;...], or --model with --tokens");
  }
  const tuning_db::Database builtin = F8_TRY(tuning_db::Database::builtin());
  request.prior = F8_TRY(builtin.table(tuning_db::Database::TablePart::kAll, &builtin_device()));
  // The skew of a model's experts is not one of --mnk.
  const Groups groups = of_model ? Groups() : F8_TRY(groups_of(args.groups));
  F8_TRY(add_listed(args.mnk, groups, request));
  if (!args.mlp.empty()) F8_TRY(take_mlps(args, request));
  if (of_model) {
    const tuner::Model model = F8_TRY(model_of(args.model, args.groups));
    std::ranges::move(F8_TRY(shapes_of_model(model, args.model)),
                      std::back_inserter(request.shapes));
    if (!args.mlp.empty()) {
      std::ranges::move(mlps_of_model(model, args.model.tokens), std::back_inserter(request.mlps));
    }
  }
  drop_repeated(request.shapes);
  drop_repeated(request.mlps);
  if (!request.mlps.empty()) F8_TRY(check_recipes_of_mlps(request.recipes));
  return request;
}

std::vector<std::string> canonical(const SweepArgs& args, const tuner::SweepRequest& request) {
  std::vector<std::string> argv = {"sweep"};
  const auto add = [&argv](const std::vector<std::string>& words) {
    argv.insert(argv.end(), words.begin(), words.end());
  };
  if (request.attention) {
    const auto [shapes, masks] = options_of(request.attention->shapes);
    std::vector<std::string_view> recipes;
    for (const AttentionRecipe recipe : request.attention->recipes) {
      recipes.push_back(to_string(recipe));
    }
    add({"--attention", "--shape", shapes, "--masks", masks, "--recipe",
         f8::format("{}", fmt::join(recipes, ",")), "--length",
         std::to_string(request.attention->accuracy_tokens)});
  } else {
    std::vector<std::string> shapes;
    for (const tuner::SweptShape& s : request.shapes) {
      const auto [e, skew] = s.groups;
      shapes.push_back(e == 0 ? f8::format("{},{},{}", s.m, s.n, s.k)
                              : to_string({e, s.m, s.n, s.k, skew}, spec_of(Op::kExperts).dims));
    }
    for (const MlpShape& s : request.mlps)
      shapes.push_back(to_string(to_dims(s), spec_of(Op::kMlp).dims));
    add({"--mnk", f8::format("{}", fmt::join(shapes, ";")), "--recipe",
         f8::format("{}", fmt::join(request.recipes, ","))});
  }
  add({"--max-ci", args.max_ci, "--seed", std::to_string(args.seed)});
  if (args.no_pruned_rows) add({"--no-pruned-rows"});
  if (args.exhaustive) add({"--exhaustive"});
  if (args.options.race) add({"--strategy", "race"});
  const tuner::Conditions& conditions = args.options.conditions;
  if (conditions.l2 == tuner::L2State::kHot) argv.push_back("--hot");
  if (conditions.clock == tuner::ClockPolicy::kLocked) add({"--clock", "locked"});
  for (const Number& number : kNumbers) {
    argv.push_back(number.name);
    argv.push_back(f8::format("{}", args.options.*number.value));
  }
  for (const Count& count : kCounts) {
    argv.push_back(count.name);
    argv.push_back(f8::format("{}", args.options.*count.value));
  }
  return argv;
}

Result<SweepArgs> parse_canonical(const std::string& argv) {
  const auto json = tuning_db::parse_json(argv, "it").value_or(nullptr);
  std::vector<std::string> words;
  bool well_formed = json.is_array() && !json.empty();
  for (size_t i = 1; well_formed && i < json.size(); ++i) {
    well_formed = json[i].is_string();
    if (well_formed) words.push_back(json[i].get<std::string>());
  }
  SweepArgs args;
  CLI::App app;
  declare(app, args);
  if (well_formed) {
    std::ranges::reverse(words);  // CLI11 takes them from the back
    try {
      app.parse(words);
      return args;
    } catch (const CLI::ParseError&) {
      well_formed = false;
    }
  }
  return fail(
      ErrorCode::kCorrupt,
      "the run's command line {} is not one that this version understands; begin a new sweep",
      quote(argv));
}

Result<double> parse_duration_s(std::string_view text) {
  std::string_view digits = text;
  double unit = 1;
  if (!digits.empty()) {
    const char last = digits.back();
    if (last == 's' || last == 'm' || last == 'h' || last == 'd') {
      unit = last == 's' ? 1 : last == 'm' ? 60 : last == 'h' ? 3600 : 86'400;
      digits.remove_suffix(1);
    }
  }
  const auto value = parse_number(digits);
  if (!value || *value == 0) {
    return fail(ErrorCode::kInvalidArgument, "{} is no duration; write 90s, 10m, 1h or 2d",
                quote(text));
  }
  return *value * unit;
}

}  // namespace f8::cli
