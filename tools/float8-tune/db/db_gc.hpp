// db gc, a command of db.
#pragma once

#include "tools/float8-tune/command.hpp"

namespace f8::cli {

void add_db_gc(CLI::App& group, Program& program);

}  // namespace f8::cli
