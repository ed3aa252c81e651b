#include "tools/float8-tune/source.hpp"

#include "base/file.hpp"
#include "tools/float8-tune/output.hpp"

namespace f8::cli {

using tuning_db::Database;
using tuning_db::OpenMode;

Status read_source(const std::string& source, const std::function<Status(const Database&)>& use) {
  if (source.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "an empty name; give builtin, databases or .jsonl files");
  }
  if (source == "builtin") return use(F8_TRY(Database::builtin()));
  if (!source.ends_with(".jsonl") && !is_standard_stream(source)) {
    return use(F8_TRY(Database::open(source, OpenMode::kReadOnly)));
  }
  const fs::path folder = F8_TRY(make_temp_directory(fs::temp_directory_path(), "float8-source-"));
  const Status used = [&]() -> Status {
    Database database = F8_TRY(Database::open(folder / "t.f8db", OpenMode::kCreate));
    const std::string text = F8_TRY(read_input(source, tuning_db::kMaxImportBytes));
    F8_TRY(database.import_jsonl(text, input_name(source)));
    return use(database);
  }();
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  return used;
}

}  // namespace f8::cli
