// prewarm: compiles every kernel that a trainer of this model will need into the cubin cache. It
// needs no GPU.
//
// A run that leaves a kernel out of the cache has missed its purpose: it fails, and says why.
//
// For each layer shape these are the kernel that the tuning table chooses and the one that the cost
// model chooses, for a trainer that loads no table. Shapes that cannot be float8 are left out and
// named.
#include <algorithm>
#include <chrono>
#include <memory>
#include <set>

#include "base/environment.hpp"
#include "codegen/cubin_cache.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/tuner/search/kernel_set.hpp"

namespace f8::cli {
namespace {

struct PrewarmOptions {
  ModelOptions model;
  std::string recipe;
  std::filesystem::path cache_dir;
  int64_t threads = 0;
};

struct Wanted {
  codegen::KernelSpec spec;
  std::set<std::string> roles;      // "cast x", "gemm output"
  std::set<std::string> chosen_by;  // of a GEMM's configuration
};

struct Plan {
  std::vector<Wanted> kernels;  // sorted by key
  std::vector<std::string> skipped;
  std::set<Shape> shapes;
  int64_t left_to_library = 0;  // GEMMs whose choice is cuBLASLt
};

void want(Plan& plan, const codegen::KernelSpec& spec, std::string_view role,
          std::string_view chosen_by) {
  auto found = std::ranges::find(plan.kernels, spec, &Wanted::spec);
  if (found == plan.kernels.end()) {
    plan.kernels.push_back({spec, {}, {}});
    found = std::prev(plan.kernels.end());
  }
  found->roles.emplace(role);
  if (!chosen_by.empty()) found->chosen_by.emplace(chosen_by);
}

Status want_gemm(Plan& plan, const Recipe& recipe, Gemm gemm, Shape shape,
                 const TuningTable* table) {
  const auto chosen = F8_TRY(tuner::choose_gemm(recipe, gemm, shape, table));
  if (chosen.choice.provider == Provider::kCublasLt) {
    ++plan.left_to_library;
    return {};
  }
  want(plan, chosen.spec(), f8::format("gemm {}", to_string(gemm)), to_string(chosen.by));
  return {};
}

Result<Plan> make_plan(const Recipe& recipe, const tuner::Model& model, int64_t tokens,
                       const TuningTable& table) {
  Plan plan;
  for (const NamedLinear& layer : model.layers) {
    const Shape shape = {tokens_of(layer, tokens), layer.out_features, layer.in_features};
    if (layer.kept.empty() && !layer.is_experts() && validate_shape(shape)) {
      plan.shapes.insert(shape);
    } else {
      plan.skipped.push_back(layer.fqn);
    }
  }
  if (plan.shapes.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--model: no layer of {} can be float8: in_features and out_features must be "
                "multiples of 16, so there is nothing to compile",
                model.name);
  }
  const std::vector<tuner::NamedKernel> casts = F8_TRY(tuner::cast_kernels(recipe));
  for (const tuner::NamedKernel& kernel : casts) want(plan, kernel.spec, kernel.role, "");
  for (const Shape& shape : plan.shapes) {
    for (const Gemm gemm : kGemms) {
      F8_TRY(want_gemm(plan, recipe, gemm, shape, &table));
      F8_TRY(want_gemm(plan, recipe, gemm, shape, nullptr));
    }
  }
  std::ranges::sort(plan.kernels, {}, [](const Wanted& w) { return codegen::key(w.spec); });
  return plan;
}

using Cubins = std::vector<std::shared_ptr<const codegen::Cubin>>;

struct Outcome {
  Plan plan;
  Cubins cubins;  // of plan.kernels
  std::filesystem::path cache_dir;
  codegen::CubinCache::NotStored not_stored;
  double wall_ms = 0;

  [[nodiscard]] int64_t from_cache() const {
    return std::ranges::count_if(cubins, [](const auto& cubin) { return cubin->from_cache; });
  }
};

Json to_json(const Outcome& outcome, const PrewarmOptions& options) {
  Json kernels = Json::array();
  double compile_ms = 0;
  for (size_t i = 0; i < outcome.cubins.size(); ++i) {
    const codegen::Cubin& cubin = *outcome.cubins[i];
    const Wanted& wanted = outcome.plan.kernels[i];
    if (!cubin.from_cache) compile_ms += cubin.compile_ms;
    kernels.push_back({{"kernel", codegen::key(wanted.spec)},
                       {"registers", cubin.registers},
                       {"spill_bytes", cubin.spill_bytes},
                       {"compile_ms", rounded(cubin.compile_ms, 4)},
                       {"from_cache", cubin.from_cache},
                       {"roles", wanted.roles},
                       {"chosen_by", wanted.chosen_by}});
  }
  const auto total = static_cast<int64_t>(outcome.cubins.size());
  const auto& [not_stored, reason] = outcome.not_stored;
  return {{"model", options.model.model},
          {"recipe", options.recipe},
          {"tokens", options.model.tokens},
          {"tp", options.model.tp},
          {"cache_dir", outcome.cache_dir.string()},
          {"kernels", kernels},
          {"total", total},
          {"compiled", total - outcome.from_cache()},
          {"from_cache", outcome.from_cache()},
          {"not_stored", not_stored},
          {"store_error", not_stored == 0 ? Json(nullptr) : Json(reason)},
          {"compile_ms", rounded(compile_ms)},
          {"wall_ms", rounded(outcome.wall_ms)},
          {"shapes", outcome.plan.shapes.size()},
          {"gemms_left_to_cublaslt", outcome.plan.left_to_library},
          {"skipped_layers", outcome.plan.skipped}};
}

void print_table(const Outcome& outcome, bool color) {
  using enum Table::Align;
  Table table({{"kernel", kLeft},
               {"registers"},
               {"spills"},
               {"compile ms"},
               {"from"},
               {"for", kLeft},
               {"chosen by", kLeft}});
  for (size_t i = 0; i < outcome.cubins.size(); ++i) {
    const codegen::Cubin& cubin = *outcome.cubins[i];
    const Wanted& wanted = outcome.plan.kernels[i];
    table.add({codegen::key(wanted.spec), fmt::to_string(cubin.registers),
               fmt::to_string(cubin.spill_bytes), f8::format("{:.0f}", cubin.compile_ms),
               cubin.from_cache ? "cache" : "compiler",
               f8::format("{}", fmt::join(wanted.roles, ", ")),
               f8::format("{}", fmt::join(wanted.chosen_by, ", "))});
  }
  print_styled(table.text(color));
  const auto total = static_cast<int64_t>(outcome.cubins.size());
  print(f8::format("\n{} kernels for {} shapes in {}: {} compiled, {} from the cache, {:.2f} s\n",
                   total, outcome.plan.shapes.size(), outcome.cache_dir.string(),
                   total - outcome.from_cache(), outcome.from_cache(), outcome.wall_ms / 1e3));
}

Result<int> prewarm(const PrewarmOptions& options, const Global& global) {
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  const tuner::Model model = F8_TRY(load(options.model));
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table = F8_TRY(merged_table(databases));
  Outcome outcome;
  outcome.plan = F8_TRY(make_plan(recipe, model, options.model.tokens, table));
  std::vector<codegen::KernelSource> sources;
  for (const Wanted& wanted : outcome.plan.kernels) {
    sources.push_back(F8_TRY(codegen::emit(wanted.spec)));
  }
  const auto& directory = options.cache_dir.empty() ? environment().cache_dir : options.cache_dir;
  if (directory.empty()) {
    return fail(ErrorCode::kEnvironment,
                "there is no cache to fill: set FLOAT8_CACHE_DIR or HOME, or give --cache-dir");
  }
  auto cache = F8_TRY(codegen::CubinCache::open(directory));
  outcome.cache_dir = cache.directory();
  if (const auto& skipped = outcome.plan.skipped; !skipped.empty()) {
    note(global,
         "{} layers are left out, their sizes on a rank are no multiples of 16 or they are "
         "experts: {}{}",
         skipped.size(), skipped.front(), skipped.size() > 1 ? ", ..." : "");
  }
  Progress progress(global);
  const auto start = std::chrono::steady_clock::now();
  outcome.cubins = F8_TRY(
      cache.get_all(sources, static_cast<int>(options.threads), [&](size_t done, size_t total) {
        progress.update(f8::format("{}/{} kernels", done, total));
      }));
  progress.clear();
  outcome.not_stored = cache.not_stored();
  outcome.wall_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  if (global.json) {
    print_json(to_json(outcome, options));
  } else {
    print_table(outcome, stdout_color(global));
  }
  if (outcome.not_stored.kernels > 0) {
    print_error(
        f8::format("{} of {} kernels are not in the cache: {}; mend that and run it again, or "
                   "name another folder with --cache-dir",
                   outcome.not_stored.kernels, outcome.cubins.size(), outcome.not_stored.reason));
    return exit_code(ErrorCode::kIo);
  }
  return kExitOk;
}

}  // namespace

void add_prewarm(CLI::App& app, Program& program) {
  auto options = std::make_shared<PrewarmOptions>();
  options->model.tokens = 8192;
  CLI::App* command = add_command(
      app, program, "prewarm", "compile a model's kernels into the cubin cache", Needs::kNothing,
      [options, &program] { return prewarm(*options, program.global); });
  const ModelFlags flags = add_model(*command, options->model);
  flags.model->required();
  add_recipe(*command, options->recipe)->required();
  command
      ->add_option("--cache-dir", options->cache_dir,
                   "where kernels are kept (default: $FLOAT8_CACHE_DIR)")
      ->type_name("DIR");
  add_integer(*command, "--threads", options->threads, "compile on so many threads; 0: all cores",
              0, 1024);
}

}  // namespace f8::cli
