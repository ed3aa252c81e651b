// Whole files: merge, export and import. All three go through a Snapshot, so what one accepts the
// others do too.
#include "base/file.hpp"
#include "tuning_db/snapshot.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db {

Result<Database::MergeCount> Database::merge_from(const fs::path& other) {
  F8_TRY(state_->require_writable());
  const Database source = F8_TRY(open(other, OpenMode::kReadOnly));
  const Snapshot snapshot = F8_TRY(read_snapshot(*source.state_->db));
  return insert_snapshot(*state_->db, snapshot);
}

Status Database::export_jsonl(const fs::path& path) const {
  const Snapshot snapshot = F8_TRY(read_snapshot(*state_->db));
  std::string text = "{\"float8_tuning_db\":2}\n";
  const auto append = [&text](const auto& records) {
    for (const auto& record : records) text += to_json_line(record) + '\n';
  };
  append(snapshot.devices);
  append(snapshot.toolchains);
  append(snapshot.methods);
  append(snapshot.runs);
  append(snapshot.trials);
  return write_file_atomic(path, text);
}

Result<Database::MergeCount> Database::import_jsonl(const fs::path& path) {
  F8_TRY(state_->require_writable());
  const std::string text = F8_TRY(read_file(path));
  const Snapshot snapshot = F8_TRY(parse_jsonl(text, path.string()));
  auto count = insert_snapshot(*state_->db, snapshot);
  if (!count) {
    return fail(count.error().code, "cannot import {}, nothing was added: {}", path.string(),
                count.error().message);
  }
  return count;
}

Status Database::export_db(const fs::path& path) const {
  const fs::path temporary = path.string() + ".new";
  std::error_code error;
  fs::remove(temporary, error);
  auto statement = F8_TRY(state_->db->prepare("VACUUM INTO ?"));
  auto copied = statement.bind(temporary.string()).run();
  if (!copied) {
    fs::remove(temporary, error);
    return copied;
  }
  fs::rename(temporary, path, error);
  if (!error) return {};
  return fail(ErrorCode::kIo, "{}: cannot write it: {}", path.string(), error.message());
}

}  // namespace f8::tuning_db
