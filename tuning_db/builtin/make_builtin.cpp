// Run by the build: makes the built-in database of JSONL files.
//   make_builtin OUTPUT [FILE.jsonl ...]
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "tuning_db/database.hpp"

namespace {

using f8::tuning_db::Database;
using f8::tuning_db::OpenMode;
namespace fs = std::filesystem;

f8::Status make(const fs::path& output, int files, char** names) {
  const fs::path scratch = output.string() + ".scratch";
  std::error_code ignored;
  for (const char* suffix : {"", "-wal", "-shm"}) fs::remove(scratch.string() + suffix, ignored);
  {
    Database db = F8_TRY(Database::open(scratch, OpenMode::kCreate));
    for (int i = 0; i < files; ++i) {
      const fs::path file = names[i];
      if (fs::file_size(file, ignored) == 0) continue;
      F8_TRY(db.import_jsonl(file));
    }
    F8_TRY(db.check());
    F8_TRY(db.export_db(output));
  }
  fs::remove(scratch, ignored);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: make_builtin OUTPUT [FILE.jsonl ...]\n");
    return 1;
  }
  const auto made = make(argv[1], argc - 2, argv + 2);
  if (made) return 0;
  fmt::print(stderr, "{}\n", made.error().message);
  return 1;
}
