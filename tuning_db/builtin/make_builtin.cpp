// Run by the build: makes the built-in database of JSON-lines files, and of each file the table of
// its device as C++ source. The files behind --rows are of the database alone: no table has their operations.
//   make_builtin DATABASE SOURCE.cpp [FILE.jsonl ...] [--rows [FILE.jsonl ...]]
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "base/file.hpp"
#include "base/format.hpp"
#include "tuning_db/database.hpp"

namespace {

using f8::tuning_db::Database;
using f8::tuning_db::OpenMode;
namespace fs = std::filesystem;

// A database of these files at `path`, in place of what was there.
f8::Result<Database> import_all(const fs::path& path, std::span<char* const> files) {
  std::error_code ignored;
  for (const char* suffix : {"", "-wal", "-shm"}) fs::remove(path.string() + suffix, ignored);
  Database db = F8_TRY(Database::open(path, OpenMode::kCreate));
  for (const char* file : files) {
    if (fs::file_size(file, ignored) == 0) continue;
    F8_TRY(db.import_jsonl(file));
  }
  F8_TRY(db.check());
  return db;
}

f8::Result<std::string> table_text(const Database& db) {
  f8::TuningTable table = F8_TRY(db.table());
  for (f8::TableSource& source : table.sources) source.name = "built-in";
  return table.serialize();
}

std::string source_of(const std::vector<std::string>& tables) {
  std::string literals, views;
  for (size_t i = 0; i < tables.size(); ++i) {
    literals += f8::format("constexpr char kTable{}[] = R\"table({})table\";\n", i, tables[i]);
    // The compiler counts the characters of a literal only up to a limit.
    views += f8::format("    std::string_view(kTable{0}, sizeof kTable{0} - 1),\n", i);
  }
  return f8::format(
      "// Made by the build: the tables of tuning_db/data.\n"
      "#include <array>\n#include <span>\n#include <string_view>\n\n"
      "namespace f8::tuning_db::text {{\n"
      "namespace {{\n{}constexpr std::array<std::string_view, {}> kTables = {{{{\n{}}}}};\n}}\n"
      "extern const std::span<const std::string_view> builtin_tables;\n"
      "constinit const std::span<const std::string_view> builtin_tables = kTables;\n"
      "}}  // namespace f8::tuning_db::text\n",
      literals, tables.size(), views);
}

f8::Status make(const fs::path& output, const fs::path& source, std::vector<char*> files) {
  const fs::path scratch = output.string() + ".scratch";
  const auto rows = std::ranges::find(files, std::string_view("--rows"));
  const size_t devices = static_cast<size_t>(rows - files.begin());
  if (rows != files.end()) files.erase(rows);
  std::vector<std::string> tables;
  for (size_t i = 0; i < devices; ++i) {
    const Database db = F8_TRY(import_all(scratch, std::span(files).subspan(i, 1)));
    tables.push_back(F8_TRY(table_text(db)));
    if (files.size() == 1) F8_TRY(db.export_db(output));
  }
  if (files.size() != 1 || devices == 0) {
    const Database db = F8_TRY(import_all(scratch, files));
    F8_TRY(db.export_db(output));
  }
  fs::remove(scratch);
  return f8::write_file_atomic(source, source_of(tables));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    f8::print(
        stderr,
        "usage: make_builtin DATABASE SOURCE.cpp [FILE.jsonl ...] [--rows [FILE.jsonl ...]]\n");
    return 1;
  }
  const auto made = make(argv[1], argv[2], std::vector(argv + 3, argv + argc));
  if (made) return 0;
  f8::print(stderr, "{}\n", made.error().message);
  return 1;
}
