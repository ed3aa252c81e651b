// The frame that every subcommand plugs into.
//
// A subcommand is one file with one function add_<name>(app, program), which declares it through
// add_command() and gives the action to run once the whole command line has been parsed. The action
// returns an exit code, or an error that main() prints as one line on standard error and turns into
// an exit code. Standard output is for data alone; progress, notes and errors go to standard error
// (output.hpp). Options that several commands share are declared in options.hpp.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace f8::cli {

enum ExitCode : int {
  kExitOk = 0,
  kExitUsage = 1,         // usage or bad input
  kExitUnfit = 2,         // no GPU, no driver, a missing library
  kExitRegression = 3,    // something measured or verified is worse than it should be
  kExitIncomplete = 4,    // stopped by a budget; what was measured is kept
  kExitInterrupted = 130  // stopped by a signal; can be resumed
};
[[nodiscard]] int exit_code(ErrorCode code);

// The options that every command takes.
struct Global {
  bool json = false;
  bool quiet = false;
  std::string color = "auto";  // auto | always | never
  std::filesystem::path db;    // --db, else FLOAT8_DB, else empty: the built-in measurements alone
  std::string db_option;       // where it comes from: "--db" or "FLOAT8_DB"
};
inline constexpr std::string_view kNoStreamDatabase =
    "- is standard input or output, and a database is a file; `db export -o -` and `db import -` "
    "pass its trials through a pipe";

using Action = std::function<Result<int>()>;
enum class Needs { kNothing, kGpu };

struct Program {
  Global global;
  Action action;  // of the command that was chosen
  Needs needs = Needs::kNothing;
};

// Declares the command `name` with the common options. An error with code kEnvironment of a command
// that needs a GPU is completed with the names of the commands that work without.
CLI::App* add_command(CLI::App& parent, Program& program, const std::string& name,
                      const std::string& description, Needs needs, Action action);
// A command that only groups others ("db", "bench").
CLI::App* add_group(CLI::App& parent, const std::string& name, const std::string& description);

// One function a subcommand, each in the file of its name; main.cpp lists them.
void add_doctor(CLI::App& app, Program& program);
void add_plan(CLI::App& app, Program& program);
void add_sweep(CLI::App& app, Program& program);
void add_resume(CLI::App& app, Program& program);  // in sweep.cpp
void add_bench(CLI::App& app, Program& program);
void add_query(CLI::App& app, Program& program);
void add_filter(CLI::App& app, Program& program);
void add_thresholds(CLI::App& app, Program& program);
void add_report(CLI::App& app, Program& program);  // in report/
void add_explain(CLI::App& app, Program& program);
void add_emit(CLI::App& app, Program& program);
void add_prewarm(CLI::App& app, Program& program);
void add_cost_model(CLI::App& app, Program& program);
void add_replay(CLI::App& app, Program& program);  // in bench/
void add_profile(CLI::App& app, Program& program);
void add_estimate(CLI::App& app, Program& program);
void add_wire(CLI::App& app, Program& program);
void add_verify_dist(CLI::App& app, Program& program);  // in dist/
void add_compare(CLI::App& app, Program& program);
void add_db(CLI::App& app, Program& program);
void add_completion(CLI::App& app, Program& program);  // in shell/
void add_man(CLI::App& app, Program& program);         // in shell/
void add_examples(CLI::App& app);                      // to the commands, of which all are there
void add_db_diff(CLI::App& group, Program& program);   // a command of db

}  // namespace f8::cli
