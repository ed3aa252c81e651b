// float8-train: a byte-level language model trained under fp8 recipes. See README.md beside this.
//
// The exit status is 0 where all is done, 1 where something failed, and 2 where this machine has no Hopper
// GPU to run on.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "train.hpp"

namespace train {
namespace {

struct CommandLine {
  Config config;
  RunOptions run;
  std::vector<std::string> recipes = {"bf16"};
  std::vector<fs::path> data = {DEFAULT_TEXT};
  fs::path out = "train-out";

  void add_to(CLI::App& app) {
    app.option_defaults()->always_capture_default();
    const auto size = [&app](const char* option, i64& value, const char* help) {
      app.add_option(option, value, help)->check(CLI::Range(1, 10'000'000));
    };
    app.add_option("--recipe", recipes, "One or several, or \"all\", in turn")->delimiter(',');
    size("--steps", config.steps, "Steps of the schedule");
    size("--hidden", config.hidden, "Width of the residual stream, a multiple of 16");
    size("--ffn", config.ffn, "Width inside a block, a multiple of 16");
    size("--layers", config.layers, "Blocks");
    size("--context", config.context, "Bytes that a prediction sees");
    size("--tokens", config.tokens, "Predictions of a step");
    size("--micro-batches", config.micro_batches, "Parts of a rank's, one after another");
    size("--fsdp", config.fsdp, "Ranks that share the weights out, a GPU each from --device on");
    app.add_option("--seed", config.seed, "Of the initial weights and of the order of the data");
    app.add_option("--lr", config.lr, "The highest learning rate");
    app.add_option("--data", data, "Text files, or folders whose sources and documents are taken");
    app.add_option("--out", out, "Folder for RECIPE.csv and RECIPE.checkpoint");
    app.add_option("--save-every", run.save_every, "Steps between checkpoints; 0: none")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--resume", run.resume, "Go on from this checkpoint");
    app.add_option("--timeout-ms", run.timeout_ms,
                   "After which a rank that does not come is an error");
    app.add_option("--table", run.table, "Kernel choices that float8-tune exported");
    app.add_option("--device", run.device, "CUDA ordinal");
    app.add_flag("--emulate", run.emulate, "Without a GPU, on the host: for tiny models");
  }
};

void print_progress(int rank, const State& curve) {
  const size_t done = curve.loss.size();
  if (rank != 0 || (done > 20 && done % 100 != 0)) return;
  std::printf("step %6zu  loss %.4f  %.2f ms\n", done, final_loss(curve), double{curve.ms.back()});
  std::fflush(stdout);
}

void run(CommandLine& line) {
  if (line.recipes.front() == "all") line.recipes = kRecipes;
  fs::create_directories(line.out);
  const std::string text = load_text(line.data);
  std::string table = "| recipe | loss (nats a byte) | tokens/s |\n|---|--:|--:|\n";
  for (const std::string& recipe : line.recipes) {
    std::printf("%s\n", recipe.c_str());
    line.config.recipe = recipe;
    line.run.checkpoint = line.out / (recipe + ".checkpoint");
    line.run.progress = print_progress;
    State curve = train(line.config, text, line.run);
    std::string csv = "step,loss,ms\n";
    for (size_t i = 0; i < curve.loss.size(); ++i) {
      csv += format("%zu,%.6g,%.4g\n", i + 1, double{curve.loss[i]}, double{curve.ms[i]});
    }
    write_file(line.out / (recipe + ".csv"), csv);
    std::ranges::sort(curve.ms);
    table += format("| %s | %.4f | %.0f |\n", recipe.c_str(), final_loss(curve),
                    1000 * double(line.config.tokens) / double{curve.ms[curve.ms.size() / 2]});
  }
  std::printf("\n%s", table.c_str());
}

}  // namespace
}  // namespace train

int main(int argc, char** argv) {
  CLI::App app("Trains a byte-level language model under fp8 recipes.", "float8-train");
  train::CommandLine line;
  line.add_to(app);
  CLI11_PARSE(app, argc, argv);
  try {
    train::run(line);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "float8-train: %s\n", error.what());
    const auto* known = dynamic_cast<const float8::Exception*>(&error);
    const float8_status code = known == nullptr ? FLOAT8_INTERNAL : known->code();
    return code == FLOAT8_ENVIRONMENT || code == FLOAT8_UNSUPPORTED ? 2 : 1;
  }
}
