// Measurements that an option names: "builtin", a database, or a .jsonl file of `db export`, of which
// "-" is one on standard input.
#pragma once

#include <functional>
#include <string>

#include "base/error.hpp"
#include "tuning_db/database.hpp"

namespace f8::cli {

// Opens the source for `use` alone: an export is read into a database that is gone afterwards.
[[nodiscard]] Status read_source(const std::string& source,
                                 const std::function<Status(const tuning_db::Database&)>& use);

}  // namespace f8::cli
