// Whole files: merge, export and import. All three go through a Snapshot, so what one accepts the
// others do too.
#include "base/file.hpp"
#include "tuning_db/json/json_text.hpp"
#include "tuning_db/snapshot.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db {

namespace {

Result<Snapshot> snapshot_of(const Connection& db) {
  Snapshot snapshot = F8_TRY(read_snapshot(db));
  if (const Status sound = check_json(snapshot); !sound) {
    return fail(ErrorCode::kCorrupt, "{}: {}", db.label(), sound.error().message);
  }
  return snapshot;
}

}  // namespace

Result<Database::MergeCount> Database::merge_from(const fs::path& other) {
  F8_TRY(state_->require_writable());
  const Database source = F8_TRY(open(other, OpenMode::kReadOnly));
  const Snapshot snapshot = F8_TRY(snapshot_of(*source.state_->db));
  return insert_snapshot(*state_->db, snapshot);
}

Result<std::string> Database::to_jsonl() const {
  const Snapshot snapshot = F8_TRY(snapshot_of(*state_->db));
  std::string text = f8::format("{{\"float8_tuning_db\":{}}}\n", kExportFormat);
  const auto append = [&text](const auto& records) {
    for (const auto& record : records) text += without_controls(to_json_line(record)) + '\n';
  };
  append(snapshot.devices);
  append(snapshot.toolchains);
  append(snapshot.methods);
  append(snapshot.runs);
  append(snapshot.trials);
  return text;
}

Status Database::export_jsonl(const fs::path& path) const {
  return write_file_atomic(path, F8_TRY(to_jsonl()));
}

Result<Database::MergeCount> Database::import_jsonl(const fs::path& path) {
  return import_jsonl(F8_TRY(read_file(path, kMaxImportBytes, Pipes::kWelcome)), path.string());
}

Result<Database::MergeCount> Database::import_jsonl(std::string_view text, std::string_view name) {
  F8_TRY(state_->require_writable());
  const Snapshot snapshot = F8_TRY(parse_jsonl(text, name));
  auto count = insert_snapshot(*state_->db, snapshot);
  if (!count) {
    return fail(count.error().code, "cannot import {}, nothing was added: {}", name,
                count.error().message);
  }
  return count;
}

Status Database::export_db(const fs::path& path) const {
  return replace_file(path, [this](const fs::path& empty, const fs::path& name) {
    return state_->db->vacuum_into(empty, name);
  });
}

}  // namespace f8::tuning_db
