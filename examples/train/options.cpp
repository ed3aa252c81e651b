#include "options.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "error.hpp"

namespace train {
namespace {

// Without --data the text is the tree of sources that this program was built from.
constexpr const char* kOwnText = DEFAULT_TEXT;

void check(const Options& options, bool recipe_and_recipes) {
  if (recipe_and_recipes) {
    fail(FLOAT8_INVALID_ARGUMENT, "--recipe and --recipes are both given; one will do");
  }
  for (const TrainConfig& run : options.runs) {
    validate(run);
    const auto same = std::ranges::count(options.runs, run.recipe, &TrainConfig::recipe);
    if (same > 1) {
      fail(FLOAT8_INVALID_ARGUMENT, "--recipes names %s %ld times", run.recipe.c_str(), same);
    }
  }
  if (!options.resume.empty() && options.runs.size() > 1) {
    fail(FLOAT8_INVALID_ARGUMENT,
         "--resume goes on with one run, and --recipes asks for %zu; use --recipe",
         options.runs.size());
  }
  if (options.timeout_s < 1 || options.timeout_s > 86'400) {
    fail(FLOAT8_INVALID_ARGUMENT, "--timeout is %d; it is 1 to 86400 seconds", options.timeout_s);
  }
  if (options.save_every < 0) {
    fail(FLOAT8_INVALID_ARGUMENT, "--save-every is %ld; it is a number of steps, 0: never",
         options.save_every);
  }
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv) {
  CLI::App app(
      "Trains a byte-level language model under fp8 recipes; writes loss curves as CSV and SVG.",
      "float8-train");
  app.option_defaults()->always_capture_default();
  Options options;
  options.data = {kOwnText};
  TrainConfig config;
  std::vector<std::string> recipes;
  const auto* recipe = app.add_option("--recipe", config.recipe, "One of " + recipe_list());
  const auto* several =
      app.add_option("--recipes", recipes, "Several, one after another; \"all\" for every one")
          ->delimiter(',');
  app.add_option("--steps", config.steps, "Steps of the schedule");
  app.add_option("--hidden", config.hidden, "Width of the residual stream");
  app.add_option("--ffn", config.ffn, "Width inside a block");
  app.add_option("--layers", config.layers, "Blocks");
  app.add_option("--context", config.context, "Bytes that a prediction sees");
  app.add_option("--tokens", config.tokens, "Predictions of a step");
  app.add_option("--micro-batches", config.micro_batches,
                 "Parts of a rank's predictions, one after another, whose gradients are added up");
  app.add_option("--fsdp", config.fsdp,
                 "Ranks that share out weights and predictions, a GPU each from --device on");
  app.add_option("--tp", config.tp,
                 "Ranks that share out the inner width of every block; with --fsdp, a product");
  app.add_option("--timeout", options.timeout_s,
                 "Seconds after which a rank that does not come is an error");
  app.add_option("--seed", config.seed, "Of the initial weights and of the order of the data");
  app.add_option("--lr", config.lr, "The highest learning rate");
  app.add_option("--data", options.data,
                 "Text files, or folders whose sources and documents are taken");
  app.add_option("--out", options.out, "Folder for RECIPE.csv, loss.svg, RECIPE.checkpoint");
  app.add_option("--resume", options.resume, "Go on from this checkpoint");
  app.add_option("--save-every", options.save_every, "Steps between checkpoints; 0: none");
  app.add_option("--table", options.table,
                 "Kernel choices that float8-tune exported; without, a cost model chooses");
  app.add_option("--device", options.device, "CUDA ordinal");
  app.add_flag("--emulate", options.emulate, "Without a GPU, on the host: for tiny models");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::Success)) {
      fail(FLOAT8_INVALID_ARGUMENT, "%s; see --help", error.what());
    }
    app.exit(error);  // --help, on standard output
    return std::nullopt;
  }
  if (recipes == std::vector<std::string>{"all"}) recipes = recipe_names();
  if (recipes.empty()) recipes = {config.recipe};
  for (const std::string& name : recipes) {
    options.runs.push_back(config);
    options.runs.back().recipe = name;
  }
  check(options, recipe->count() > 0 && several->count() > 0);
  return options;
}

}  // namespace train
