#include "tools/float8-tune/command.hpp"

#include "base/environment.hpp"
#include "base/format.hpp"

namespace f8::cli {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kEnvironment:
    case ErrorCode::kCuda:
    case ErrorCode::kOutOfMemory:
      return kExitUnfit;
    case ErrorCode::kInterrupted:
      return kExitInterrupted;
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kNotFound:
    case ErrorCode::kUnsupported:
    case ErrorCode::kIo:
    case ErrorCode::kCorrupt:
    case ErrorCode::kCompile:
    case ErrorCode::kInternal:
      return kExitUsage;
  }
  return kExitUsage;
}

CLI::App* add_command(CLI::App& parent, Program& program, const std::string& name,
                      const std::string& description, Needs needs, Action action) {
  CLI::App* command = parent.add_subcommand(name, description);
  Global& global = program.global;
  command->add_flag("--json", global.json, "print JSON on standard output");
  command
      ->add_option("--db", global.db,
                   "a tuning database, asked before the built-in one (default: $FLOAT8_DB)")
      ->type_name("FILE");
  command->add_flag("--quiet", global.quiet, "no progress and no notes on standard error");
  command->add_option("--color", global.color, "auto, always or never")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->type_name("WHEN");
  command->callback([&program, needs, command, action = std::move(action)] {
    const bool given = command->count("--db") > 0;
    if (!given) program.global.db = environment().db;
    if (given && program.global.db.empty()) {
      throw CLI::ValidationError("--db", "the name of the database is empty; give a file");
    }
    program.global.db_option = given ? "--db" : "FLOAT8_DB";
    if (program.global.db == "-") {
      throw CLI::ValidationError(program.global.db_option, std::string(kNoStreamDatabase));
    }
    program.needs = needs;
    program.action = action;
  });
  return command;
}

CLI::App* add_group(CLI::App& parent, const std::string& name, const std::string& description) {
  CLI::App* group = parent.add_subcommand(name, description);
  group->require_subcommand(1);
  group->footer(f8::format("float8-tune {} SUBCOMMAND --help has the options of each.\n\n{}", name,
                           parent.get_footer()));
  return group;
}

}  // namespace f8::cli
