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
  const TemporaryFolder folder = F8_TRY(TemporaryFolder::make("float8-source-"));
  Database database = F8_TRY(Database::open(folder.path() / "t.f8db", OpenMode::kCreate));
  const std::string text = F8_TRY(read_input(source, tuning_db::kMaxImportBytes));
  F8_TRY(database.import_jsonl(text, input_name(source)));
  return use(database);
}

}  // namespace f8::cli
