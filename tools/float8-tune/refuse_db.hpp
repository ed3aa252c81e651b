// The common --db on a command that asks no database of the user's: an option that is accepted
// without effect would let someone believe in the answer.
#pragma once

#include <string>

#include "tools/float8-tune/command.hpp"

namespace f8::cli {

// --db is refused with what to do instead, and --help leaves it out. FLOAT8_DB, which is there for
// other commands, is no error.
inline void refuse_db(CLI::App& command, const std::string& instead) {
  const auto refuse = [instead](std::string&) -> std::string {
    throw CLI::ValidationError("--db", instead);  // the name of a hidden option is not printed
  };
  command.get_option("--db")->group("")->check(CLI::Validator(refuse, ""));
}

}  // namespace f8::cli
