#include "tools/float8-tune/options.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/file.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "runtime/device/device_info.hpp"
#include "runtime/gemm/gemm.hpp"
#include "tools/tuner/fit/wire_fit.hpp"
#include "tuning_db/estimate/builtin_tables.hpp"

namespace f8::cli {

CLI::Option* add_integer(CLI::App& command, const std::string& name, int64_t& value,
                         const std::string& description, int64_t min, int64_t max) {
  const auto parse = [&value, name, min, max](const std::string& text) {
    const auto parsed = number_of<int64_t>(text);
    if (!parsed || *parsed < min || *parsed > max) {
      throw CLI::ValidationError(  // CLI11's way to refuse a value
          name, f8::format("{} is not an integer from {} to {}", quote(text), min, max));
    }
    value = *parsed;
  };
  return command.add_option_function<std::string>(name, parse, description)->type_name("INT");
}

Result<double> parse_share(std::string_view text, ShareLimits limits) {
  const std::string_view number = text.ends_with('%') ? text.substr(0, text.size() - 1) : text;
  const auto parsed = number_of<double>(number);
  if (!parsed || std::isnan(*parsed)) {
    return fail(ErrorCode::kInvalidArgument, "{} is no share; write 0.5%, or 0.005 as a fraction",
                quote(text));
  }
  const double value = number.size() < text.size() ? *parsed / 100 : *parsed;
  if (value >= limits.least && value <= limits.most) return value;
  return fail(ErrorCode::kInvalidArgument,
              "{} is {:g}%, and it is from {:g}% to {:g}%; half a per cent is 0.5%, or 0.005 as a "
              "fraction",
              quote(text), 100 * value, 100 * limits.least, 100 * limits.most);
}

CLI::Option* add_share(CLI::App& command, const std::string& name, double& value,
                       const std::string& description, ShareLimits limits) {
  const auto parse = [&value, name, limits](const std::string& text) {
    const auto parsed = parse_share(text, limits);
    if (!parsed) throw CLI::ValidationError(name, parsed.error().message);
    value = *parsed;
  };
  return command
      .add_option_function<std::string>(
          name, parse,
          f8::format("{}; {:g}%, or {:g} as a fraction", description, 100 * value, value))
      ->default_str(f8::format("{:g}%", 100 * value))
      ->type_name("SHARE");
}

CLI::Option* add_margin(CLI::App& command, double& margin) {
  return add_share(command, "--margin", margin, "convert above a speedup of 1 + margin");
}

CLI::Option* add_fuse(CLI::App& command, bool& fuse) {
  return command.add_flag(
      "--fuse", fuse, "float8.torch.fuse will run the MLPs: the linears of one have one verdict");
}

CLI::Option* add_input(CLI::App& command, const std::string& name, std::filesystem::path& file,
                       const std::string& description) {
  return command.add_option(name, file, description + "; - is standard input")->type_name("FILE");
}

CLI::Option* add_output(CLI::App& command, const std::string& name, std::filesystem::path& file,
                        const std::string& description) {
  return command.add_option(name, file, description + "; - is standard output, for this alone")
      ->type_name("FILE");
}

CLI::Option* add_recipe(CLI::App& command, std::string& recipe) {
  std::vector<std::string> names;
  for (const Recipe& builtin : builtin_recipes()) names.push_back(builtin.name);
  return command.add_option("--recipe", recipe, f8::format("{}", fmt::join(names, ", ")))
      ->type_name("RECIPE");
}

CLI::Option* add_mnk(CLI::App& command, std::string& mnk) {
  return command
      .add_option(
          "--mnk", mnk,
          "tokens, out_features, in_features; several with ';', ranges as 1024:16384:x2; or "
          "one shape as errors print it, m8192n4096k4096")
      ->type_name("M,N,K");
}

static CLI::Option* add_skew(CLI::App& command, std::string& skew) {
  return command
      .add_option("--skew", skew,
                  "how the experts share the rows: even, zipf, one (has all), or the exponent of "
                  "Zipf's law")
      ->type_name("SKEW");
}

static Result<int64_t> skew_of(const std::string& text) {
  constexpr std::array kNames = {std::pair("even", kEven), std::pair("zipf", kZipf),
                                 std::pair("one", kOneExpert)};
  const auto named =
      std::ranges::find(kNames, text, [](const auto& name) { return std::string(name.first); });
  if (named != kNames.end()) return named->second;
  const auto skew = number_of<int64_t>(text);
  if (skew && *skew >= kEven && *skew <= kOneExpert) return *skew;
  return fail(ErrorCode::kInvalidArgument,
              "--skew: {} is not even, zipf, one or a number from {} to {}", quote(text), kEven,
              kOneExpert);
}

void add_groups(CLI::App& command, GroupOptions& options) {
  add_integer(command, "--experts", options.experts,
              "experts, each with a linear of this N and K; M is the rows of all", 1, kMaxExperts);
  add_skew(command, options.skew);
}

Result<Groups> groups_of(const GroupOptions& options) {
  const Groups groups{.experts = options.experts, .skew = F8_TRY(skew_of(options.skew))};
  if (groups.experts == 0 && groups.skew != kEven) {
    return fail(ErrorCode::kInvalidArgument, "--skew is of experts: give --experts too");
  }
  return groups;
}

Result<Recipe> recipe_of(const std::string& recipe) {
  if (recipe == bf16_recipe().name) {
    return fail(ErrorCode::kInvalidArgument,
                "--recipe: in bf16 nothing is fp8, so there is nothing to tune; it is what every "
                "recipe is compared with");
  }
  return of_option("--recipe", find_recipe(recipe));
}

Result<std::vector<std::string>> recipes_of(const std::string& list) {
  std::vector<std::string> names;
  for (const std::string& item : split(list, ',')) {
    const Recipe recipe = F8_TRY(recipe_of(item));
    if (std::ranges::find(names, recipe.name) == names.end()) names.push_back(recipe.name);
  }
  return names;
}

Result<std::vector<Shape>> shapes_of(const std::string& mnk) {
  if (mnk.starts_with('m')) return std::vector{F8_TRY(of_option("--mnk", parse_dims(mnk)))};
  return of_option("--mnk", parse_shapes(mnk));
}

ModelFlags add_model(CLI::App& command, ModelOptions& options) {
  ModelFlags flags{};
  flags.model = command
                    .add_option("--model", options.model,
                                f8::format("{}; or a config.json, .safetensors, *.index.json or a "
                                           "list of layers; - is standard input",
                                           fmt::join(tuner::builtin_models(), ", ")))
                    ->type_name("NAME|FILE");
  flags.tp = add_integer(command, "--tp", options.tp, "tensor-parallel ranks that share the model",
                         1, 1 << 16);
  flags.tokens = add_integer(command, "--tokens", options.tokens,
                             "M: how many tokens each linear sees in a step");
  return flags;
}

std::array<CLI::Option*, 2> add_model_ranks(CLI::App& command, ModelOptions& options) {
  options.experts = tuner::ExpertsAs::kModule;
  CLI::Option* ep = add_integer(
      command, "--ep", options.ep,
      "expert-parallel ranks, each of which has a part of every layer's experts", 1, 1 << 16);
  CLI::Option* linears =
      command
          .add_flag_function(
              "--expert-linears",
              [&options](int64_t) { options.experts = tuner::ExpertsAs::kLinears; },
              "the experts of a config.json are linears of their own in the program, each by "
              "itself")
          ->excludes(ep);
  return {ep, linears};
}

std::array<CLI::Option*, 3> add_model_experts(CLI::App& command, ModelOptions& options) {
  const auto [ep, linears] = add_model_ranks(command, options);
  CLI::Option* skew = add_skew(command, options.skew)->excludes(linears);
  return {ep, skew, linears};
}

void add_conditions(CLI::App& command, tuner::Conditions& conditions) {
  command.add_flag_function(
      "--hot", [&](int64_t) { conditions.l2 = tuner::L2State::kHot; },
      "repeat one operand set, which stays in L2 as far as it fits; such times decide nothing");
  command
      .add_option_function<std::string>(
          "--clock",
          [&](const std::string& policy) {
            conditions.clock =
                policy == "locked" ? tuner::ClockPolicy::kLocked : tuner::ClockPolicy::kSteady;
          },
          "steady: the SM clock that the device holds under this load; locked: a measurement in "
          "which it moves is noisy (the clock is locked from outside)")
      ->default_str("steady")
      ->check(CLI::IsMember({"steady", "locked"}))
      ->type_name("POLICY");
}

CLI::Option* add_network(CLI::App& command, double& gbit) {
  return command.add_option("--network-gbit", gbit, "Gbit/s of each GPU's network card")
      ->default_str(f8::format("{:g}", 8 * tuning_db::WireModel::fitted().network.gb_per_s))
      ->check(CLI::Range(1.0, 1e6))
      ->type_name("GBIT");
}

void add_ranks(CLI::App& command, RankOptions& options) {
  add_integer(command, "--fsdp", options.fsdp, "ranks that share each weight by FSDP", 1,
              tuning_db::kMaxRanks);
  add_integer(command, "--hosts", options.hosts,
              "hosts of all fsdp * tp ranks; as few as have at most 8 each where it is not given",
              1, tuning_db::kMaxRanks);
  add_network(command, options.network_gbit);
  add_wire_rows(command, options.wire_rows);
}

CLI::Option* add_wire_rows(CLI::App& command, std::filesystem::path& rows) {
  return add_input(command, "--wire-rows", rows,
                   "collectives measured by benchmarks/distributed/wire.py, to which the wire's "
                   "constants are fitted instead of the built-in ones");
}

Result<tuning_db::WireModel> wire_model_of(const std::filesystem::path& rows) {
  tuning_db::WireModel model = tuning_db::WireModel::fitted();
  if (rows.empty()) return model;
  const auto measured = F8_TRY(of_option("--wire-rows", tuner::read_wire_rows(rows)));
  auto fit = F8_TRY(of_option("--wire-rows", tuner::fit_wire(measured, model)));
  fit.model.source = input_name(rows);
  fit.model.date.clear();
  return fit.model;
}

tuning_db::Parallelism parallelism_of(const RankOptions& options, int64_t tp) {
  return {
      .fsdp = options.fsdp, .tp = tp, .hosts = options.hosts, .network_gbit = options.network_gbit};
}

Result<tuner::Model> load(const ModelOptions& options) {
  const int64_t skew = F8_TRY(skew_of(options.skew));
  tuner::Model model =
      F8_TRY(of_option("--model", tuner::load_model(options.model, options.experts)));
  F8_TRY(of_option("--tp", tuner::shard(model, options.tp)));
  F8_TRY(of_option("--ep", tuner::shard_experts(model, options.ep)));
  bool has_experts = false;
  for (NamedLinear& layer : model.layers) {
    has_experts |= layer.is_experts();
    if (layer.is_experts()) layer.groups.skew = skew;
  }
  if (skew != kEven && !has_experts) {
    return fail(ErrorCode::kInvalidArgument, "--skew: {} has no layer of experts", model.name);
  }
  return model;
}

Result<tuning_db::Database> open_user_database(const Global& global, tuning_db::OpenMode mode) {
  if (global.db.empty()) {
    return fail(ErrorCode::kInvalidArgument, "which database? give --db FILE or set FLOAT8_DB");
  }
  return of_option(global.db_option, tuning_db::Database::open(global.db, mode));
}

Result<tuning_db::Database> open_named_database(const std::filesystem::path& file) {
  std::error_code error;
  if (file == "built-in" && !std::filesystem::exists(file, error)) {
    return tuning_db::Database::builtin();
  }
  if (is_standard_stream(file)) {
    return fail(ErrorCode::kInvalidArgument, "{}", kNoStreamDatabase);
  }
  return tuning_db::Database::open(file, tuning_db::OpenMode::kReadOnly);
}

std::vector<const tuning_db::Database*> Databases::pointers() const {
  std::vector<const tuning_db::Database*> all;
  for (const tuning_db::Database& database : owned) all.push_back(&database);
  return all;
}

Result<Databases> open_databases(const Global& global) {
  Databases databases;
  if (!global.db.empty()) {
    databases.owned.push_back(F8_TRY(open_user_database(global, tuning_db::OpenMode::kReadOnly)));
  }
  databases.owned.push_back(F8_TRY(tuning_db::Database::builtin()));
  return databases;
}

const DeviceClass* Databases::asked(const tuning_db::Database& database) const {
  return &database == &owned.back() ? &builtin_device() : this_gpu();
}

const DeviceClass* this_gpu() {
  static const Result<runtime::DeviceInfo> found = [] -> Result<runtime::DeviceInfo> {
    if (F8_TRY(runtime::device_count()) == 0) return fail(ErrorCode::kEnvironment, "no GPU");
    return runtime::device_info(0);
  }();
  return found ? &*found : nullptr;
}

const tuning_db::Machine* this_machine() {
  static const std::optional<tuning_db::Machine> here = [] {
    std::optional<tuning_db::Machine> found;
    if (this_gpu() != nullptr) found = {*this_gpu(), runtime::toolchain_versions()};
    return found;
  }();
  return here ? &*here : nullptr;
}

const DeviceClass& builtin_device() {
  static const DeviceClass first = [] {
    const auto tables = tuning_db::builtin_tables();
    return tables.empty() ? DeviceClass{} : tables.front().devices.front();
  }();
  return this_gpu() != nullptr ? *this_gpu() : first;
}

Result<TuningTable> merged_table(const Databases& databases, tuning_db::Database::TablePart part,
                                 const DeviceClass* device) {
  TuningTable merged;
  for (const tuning_db::Database& database : databases.owned) {
    merged.add_behind(
        F8_TRY(database.table(part, device != nullptr ? device : databases.asked(database))));
  }
  return merged;
}

}  // namespace f8::cli
