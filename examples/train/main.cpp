// float8-train: a byte-level language model trained under fp8 recipes. See README.md beside this.
//
// Exit status: 0 done, 1 failed, 2 this machine has no Hopper GPU to run on.
#include <cstdio>
#include <exception>

#include "options.hpp"
#include "report.hpp"

namespace f8::train {
namespace {

constexpr int64_t kStepsOfALine = 100;

void print_progress(const Curve& curve) {
  const auto done = static_cast<int64_t>(curve.loss.size());
  if (done != 1 && done % kStepsOfALine != 0) return;
  fmt::print("{:>20} step {:>6}  loss {:.4f}  smoothed {:.4f}  {:.2f} ms\n", curve.name, done,
             curve.loss.back(), smoothed(curve.loss).back(), curve.ms.back());
  std::fflush(stdout);
}

Status run(const Options& options) {
  std::error_code error;
  std::filesystem::create_directories(options.out, error);
  if (error) {
    return fail(ErrorCode::kIo, "cannot create the folder {}: {}; name another with --out",
                options.out.string(), error.message());
  }
  const Text text = F8_TRY(load_text(options.data, options.runs.front().context));
  fmt::print("text: {} bytes of {} files, {}\n", text.bytes.size(), text.files, text.hash);
  std::vector<RunResult> runs;
  for (const TrainConfig& config : options.runs) {
    const auto backend =
        F8_TRY(options.emulate ? make_host_backend()
                               : make_gpu_backend(options.device, config.hidden, config.context));
    if (!options.table.empty()) {
      F8_TRY(to_result(backend->context().load_table(options.table.string())));
    }
    RunOptions run_options;
    run_options.checkpoint = options.out / (config.recipe + ".checkpoint");
    run_options.save_every = options.save_every;
    run_options.resume = options.resume;
    run_options.progress = print_progress;
    runs.push_back(F8_TRY(train(*backend, config, text, run_options)));
    F8_TRY(write_report(options.out, runs));
  }
  fmt::print("\n{}\nwritten to {}\n", summary(runs), options.out.string());
  return {};
}

int run_main(int argc, char** argv) {
  const auto options = parse_options(argc, argv);
  if (!options) {
    fmt::print(stderr, "float8-train: {}\n", options.error().message);
    return 1;
  }
  if (!*options) return 0;
  const Status status = run(**options);
  if (status) return 0;
  fmt::print(stderr, "float8-train: {}\n", status.error().message);
  const ErrorCode code = status.error().code;
  return code == ErrorCode::kEnvironment || code == ErrorCode::kUnsupported ? 2 : 1;
}

}  // namespace
}  // namespace f8::train

int main(int argc, char** argv) {
  // Nothing of ours throws; the libraries may.
  try {
    return f8::train::run_main(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "float8-train: {}\n", error.what());
    return 1;
  }
}
