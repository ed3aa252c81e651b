// The environment variables that float8 reads. This file is the whole list; they are read once, at
// first use.
//
//   FLOAT8_CACHE_DIR   the folder of compiled kernels
//                      (default: $XDG_CACHE_HOME/float8, else ~/.cache/float8, each
//                      where the variable names an absolute directory; else there is none)
//   FLOAT8_DB          the user's tuning database (default: the built-in measurements alone)
//   FLOAT8_LOG         error | warning | info (default: warning)
//   FLOAT8_TUNE        the program that tunes at first use (default: float8-tune next to the
//                      library, else in PATH)
#pragma once

#include <filesystem>
#include <string>

namespace f8 {

struct Environment {
  std::filesystem::path cache_dir;  // empty: kernels are kept in memory alone
  std::filesystem::path db;         // empty where FLOAT8_DB is not set
  std::string log_level;
  std::string tune;  // empty where FLOAT8_TUNE is not set
};

[[nodiscard]] const Environment& environment();

}  // namespace f8
