// float8-tune: measure, keep and ask. See command.hpp for how a subcommand plugs in.
#include <csignal>
#include <exception>

#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/output.hpp"

namespace f8::cli {
namespace {

constexpr auto kCommands = {add_doctor,  add_bench, add_plan,    add_sweep,
                            add_resume,  add_query, add_filter,  add_thresholds,
                            add_explain, add_emit,  add_prewarm, add_db};

constexpr std::string_view kWithoutGpu =
    "doctor, plan, query, filter, thresholds, explain, emit, prewarm and db work without a GPU";

int report(const Program& program, const Error& error) {
  if (error.code == ErrorCode::kEnvironment && program.needs == Needs::kGpu) {
    print_error(fmt::format("{}; {}", error.message, kWithoutGpu));
  } else {
    print_error(error.message);
  }
  return exit_code(error.code);
}

// The innermost command that the line names, for the hint at its help.
std::string command_path(const CLI::App& app) {
  std::string path = app.get_name();
  for (const CLI::App* chosen : app.get_subcommands()) path += " " + command_path(*chosen);
  return path;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Measures, keeps and answers: which fp8 kernels to use, and which layers to convert.",
      "float8-tune");
  app.set_version_flag("--version", FLOAT8_VERSION);
  app.require_subcommand(1);
  app.option_defaults()->always_capture_default();
  Program program;
  for (const auto add : kCommands) add(app, program);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      app.exit(error);  // --help, --version: on standard output
      return kExitOk;
    }
    print_error(fmt::format("{}; see {} --help", error.what(), command_path(app)));
    return kExitUsage;
  }
  const Result<int> code = program.action();
  if (!code) return report(program, code.error());
  if (const Status written = finish_output(); !written) return report(program, written.error());
  return *code;
}

}  // namespace
}  // namespace f8::cli

int main(int argc, char** argv) {
  // Nothing of ours throws; the libraries may.
  try {
    return f8::cli::run(argc, argv);
  } catch (const std::exception& error) {
    f8::cli::print_error(fmt::format("internal error: {}; please report it", error.what()));
    return f8::cli::kExitUsage;
  }
}
