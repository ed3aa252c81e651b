// float8-tune: measure, keep and ask. See command.hpp for how a subcommand plugs in.
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <exception>
#include <new>
#include <sstream>

#include "base/text.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/output.hpp"

namespace f8::cli {
namespace {

constexpr auto kCommands = {
    add_doctor,      add_bench,      add_plan,       add_sweep,   add_resume,   add_query,
    add_filter,      add_thresholds, add_explain,    add_compare, add_report,   add_emit,
    add_prewarm,     add_cost_model, add_replay,     add_profile, add_estimate, add_wire,
    add_verify_dist, add_db,         add_completion, add_man};

constexpr std::string_view kWithoutGpu =
    "doctor, plan, query, filter, thresholds, explain, compare, report, emit, prewarm, cost-model, "
    "replay, profile, estimate, wire and db work without a GPU, and verify-dist with --emulate";

int report_error(const Program& program, const Error& error) {
  if (error.code == ErrorCode::kEnvironment && program.needs == Needs::kGpu) {
    print_error(f8::format("{}; {}", error.message, kWithoutGpu));
  } else {
    print_error(error.message);
  }
  return exit_code(error.code);
}

// The innermost command that the line names.
const CLI::App& chosen_command(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : chosen_command(*chosen.front());
}

std::string path_of(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return (parent == nullptr ? "" : path_of(*parent) + " ") + command.get_name();
}

std::string usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = chosen_command(app);
  const std::vector<std::string> rest = command.remaining();
  // CLI11 says that a command is missing, and not that the word in its place is none.
  const bool unknown = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr &&
                       command.get_require_subcommand_min() > 0 && !rest.empty();
  std::string_view what = error.what();
  (void)take(what, ": ");  // it begins with the name of a hidden option, which is empty
  return f8::format("{}; see {} --help",
                    unknown ? f8::format("unknown command {}", quote(rest.front())) : what,
                    path_of(command));
}

int run(int argc, char** argv) {
  CLI::App app(
      "Measures, keeps and answers: which fp8 kernels to use, and which layers to convert.",
      "float8-tune");
  app.set_version_flag("--version", FLOAT8_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Where an option or argument is a FILE, - is standard input or standard output, and ./- the "
      "file of that name; a database is always a file.");
  app.option_defaults()->always_capture_default();
  Program program;
  for (const auto add : kCommands) add(app, program);
  add_examples(app);
  Result<int> code = kExitOk;
  try {
    app.parse(argc, argv);
    code = program.action();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::Success)) {
      print_error(usage_error(app, error));
      return kExitUsage;
    }
    std::ostringstream text;  // of --help, --version
    app.exit(error, text);
    print_styled(text.str());
  }
  if (!code) return report_error(program, code.error());
  if (const Status written = finish_output(); !written)
    return report_error(program, written.error());
  return *code;
}

}  // namespace
}  // namespace f8::cli

namespace {

// CLI11 allocates while static objects are made, and in functions that are noexcept: there an
// exception ends the process, and this says why.
[[noreturn]] void end_with_a_line() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    f8::cli::print_out_of_memory();
    ::_exit(f8::cli::kExitUnfit);
  } catch (...) {
  }
  std::abort();
}

// Before all other static objects.
__attribute__((constructor(101))) void before_static_objects() {
  std::set_terminate(end_with_a_line);
}

}  // namespace

int main(int argc, char** argv) {
  // A reader that has gone and a limit of a file's size are errors of the write, with a line that says
  // so. SQLite writes too.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  // Our code does not throw; the libraries may.
  try {
    return f8::cli::run(argc, argv);
  } catch (const std::bad_alloc&) {
    f8::cli::print_out_of_memory();
    return f8::cli::kExitUnfit;
  } catch (const std::exception& error) {
    f8::cli::print_error(f8::format("internal error: {}; please report it", error.what()));
    return f8::cli::kExitUsage;
  }
}
