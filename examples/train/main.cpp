// float8-train: a byte-level language model trained under fp8 recipes. See README.md beside this.
//
// The exit status is 0 where all is done, 1 where something failed, and 2 where this machine has no
// Hopper GPU to run on.
#include <cstdio>
#include <exception>

#include "error.hpp"
#include "options.hpp"
#include "report/report.hpp"

namespace train {
namespace {

constexpr int64_t kStepsOfALine = 100;

void print_progress(const Curve& curve) {
  const auto done = static_cast<int64_t>(curve.loss.size());
  if (done != 1 && done % kStepsOfALine != 0) return;
  std::printf("%20s step %6ld  loss %.4f  smoothed %.4f  %.2f ms\n", curve.name.c_str(), done,
              double{curve.loss.back()}, smoothed(curve.loss).back(), double{curve.ms.back()});
  std::fflush(stdout);
}

void run(const Options& options) {
  std::error_code error;
  std::filesystem::create_directories(options.out, error);
  if (error) {
    fail(FLOAT8_IO, "cannot create the folder %s: %s; name another with --out", options.out.c_str(),
         error.message().c_str());
  }
  const Text text = load_text(options.data, options.runs.front().context);
  std::printf("text: %zu bytes of %zu files, %s\n", text.bytes.size(), text.files,
              text.hash.c_str());
  std::vector<RunResult> runs;
  for (const TrainConfig& config : options.runs) {
    const auto make_backend = [&](int rank) {
      auto backend = options.emulate
                         ? make_host_backend(rank % 8)
                         : make_gpu_backend(options.device + rank, config.hidden, config.context);
      if (!options.table.empty()) {
        static_cast<void>(backend->context().load_table(options.table.string()).value());
      }
      return backend;
    };
    RunOptions run_options;
    run_options.checkpoint = options.out / (config.recipe + ".checkpoint");
    run_options.save_every = options.save_every;
    run_options.resume = options.resume;
    run_options.rank_timeout_ms = options.timeout_s * 1000;
    run_options.progress = print_progress;
    runs.push_back(train_on_ranks(make_backend, config, text, run_options));
    write_report(options.out, runs);
  }
  std::printf("\n%s\nwritten to %s\n", summary(runs).c_str(), options.out.c_str());
}

}  // namespace
}  // namespace train

int main(int argc, char** argv) {
  try {
    const auto options = train::parse_options(argc, argv);
    if (options) train::run(*options);
    return 0;
  } catch (const float8::Exception& error) {
    std::fprintf(stderr, "float8-train: %s\n", error.what());
    return error.code() == FLOAT8_ENVIRONMENT || error.code() == FLOAT8_UNSUPPORTED ? 2 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "float8-train: %s\n", error.what());
    return 1;
  }
}
