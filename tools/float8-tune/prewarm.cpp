// prewarm: compiles every kernel that a trainer of this model will need into the cubin cache. Needs
// no GPU.
//
// For each layer shape that is the kernel that the tuning table chooses and the one that the cost
// model chooses, for a trainer that loads no table. Shapes that cannot be float8 are left out, and
// said so.
#include <algorithm>
#include <chrono>
#include <memory>
#include <set>

#include "base/environment.hpp"
#include "codegen/cubin_cache.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/tuner/kernel_set.hpp"

namespace f8::cli {
namespace {

struct Options {
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
  int64_t left_to_library = 0;  // GEMMs that the table gives to cuBLASLt
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
  want(plan, chosen.spec(), fmt::format("gemm {}", to_string(gemm)), to_string(chosen.by));
  return {};
}

Result<Plan> make_plan(const Recipe& recipe, const tuner::Model& model, int64_t tokens,
                       const TuningTable& table) {
  Plan plan;
  for (const NamedLinear& layer : model.layers) {
    const Shape shape = {tokens, layer.out_features, layer.in_features};
    if (validate_shape(shape)) {
      plan.shapes.insert(shape);
    } else {
      plan.skipped.push_back(layer.fqn);
    }
  }
  if (plan.shapes.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--model: no layer of {} can be float8: in_features and out_features must be "
                "multiples of 16",
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

std::string joined(const std::set<std::string>& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

Result<int> prewarm(const Options& options, const Global& global) {
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  const tuner::Model model = F8_TRY(load(options.model));
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table = F8_TRY(merged_table(databases));
  const Plan plan = F8_TRY(make_plan(recipe, model, options.model.tokens, table));
  std::vector<codegen::KernelSource> sources;
  for (const Wanted& wanted : plan.kernels) sources.push_back(F8_TRY(codegen::emit(wanted.spec)));

  auto cache = F8_TRY(codegen::CubinCache::open(options.cache_dir.empty() ? environment().cache_dir
                                                                          : options.cache_dir));
  if (!plan.skipped.empty()) {
    note(global, "{} layers stay bf16, their sizes are no multiples of 16: {}{}",
         plan.skipped.size(), plan.skipped.front(), plan.skipped.size() > 1 ? ", ..." : "");
  }
  Progress progress(global);
  const auto start = std::chrono::steady_clock::now();
  const auto cubins = F8_TRY(
      cache.get_all(sources, static_cast<int>(options.threads), [&](size_t done, size_t total) {
        progress.update(fmt::format("{}/{} kernels", done, total));
      }));
  progress.clear();
  const double wall_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();

  Json rows = Json::array();
  Table text({{"kernel", Table::Align::kLeft},
              {"registers"},
              {"spills"},
              {"compile ms"},
              {"from"},
              {"for", Table::Align::kLeft},
              {"chosen by", Table::Align::kLeft}});
  int64_t from_cache = 0;
  double compile_ms = 0;
  for (size_t i = 0; i < cubins.size(); ++i) {
    const codegen::Cubin& cubin = *cubins[i];
    const Wanted& wanted = plan.kernels[i];
    if (cubin.from_cache) {
      ++from_cache;
    } else {
      compile_ms += cubin.compile_ms;
    }
    rows.push_back({{"kernel", sources[i].key},
                    {"registers", cubin.registers},
                    {"spill_bytes", cubin.spill_bytes},
                    {"compile_ms", rounded(cubin.compile_ms, 4)},
                    {"from_cache", cubin.from_cache},
                    {"roles", wanted.roles},
                    {"chosen_by", wanted.chosen_by}});
    text.add({sources[i].key, fmt::format("{}", cubin.registers),
              fmt::format("{}", cubin.spill_bytes), fmt::format("{:.0f}", cubin.compile_ms),
              cubin.from_cache ? "cache" : "compiler", joined(wanted.roles),
              joined(wanted.chosen_by)});
  }
  const auto total = static_cast<int64_t>(cubins.size());
  if (global.json) {
    print_json({{"model", model.name},
                {"recipe", recipe.name},
                {"tokens", options.model.tokens},
                {"tp", options.model.tp},
                {"cache_dir", cache.directory().string()},
                {"kernels", rows},
                {"total", total},
                {"compiled", total - from_cache},
                {"from_cache", from_cache},
                {"compile_ms", rounded(compile_ms, 6)},
                {"wall_ms", rounded(wall_ms, 6)},
                {"shapes", plan.shapes.size()},
                {"gemms_left_to_cublaslt", plan.left_to_library},
                {"skipped_layers", plan.skipped}});
    return kExitOk;
  }
  print(text.text(stdout_color(global)));
  print(fmt::format("\n{} kernels for {} shapes in {}: {} compiled, {} from the cache, {:.2f} s\n",
                    total, plan.shapes.size(), cache.directory().string(), total - from_cache,
                    from_cache, wall_ms / 1e3));
  return kExitOk;
}

}  // namespace

void add_prewarm(CLI::App& app, Program& program) {
  auto options = std::make_shared<Options>();
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
