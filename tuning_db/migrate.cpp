// Schema versions and the steps between them. A step is SQL that takes version N to N + 1; all
// steps run in one transaction, after open.cpp has put a backup beside the file.
#include "tuning_db/state.hpp"

namespace f8::tuning_db::text {
extern const std::string_view schema_sql;
}

namespace f8::tuning_db {

std::string_view Database::schema() {
  return text::schema_sql;
}

const SchemaSpec& current_schema() {
  // Version 1 is the first that was ever written, so no step leads to it.
  static const SchemaSpec schema{kSchemaVersion, Database::schema(), {}};
  return schema;
}

Status migrate(Connection& db, int from, const SchemaSpec& schema) {
  auto transaction = F8_TRY(Transaction::begin(db));
  // Another process may have migrated while this one waited for the lock.
  int version = static_cast<int>(F8_TRY(db.scalar("PRAGMA user_version")));
  if (version != from && version != schema.version) {
    return fail(ErrorCode::kIo, "{}: its schema changed from {} to {} meanwhile; try again",
                db.label(), from, version);
  }
  for (; version < schema.version; ++version) {
    const Migration* step = nullptr;
    for (const Migration& m : schema.migrations) {
      if (m.from == version) step = &m;
    }
    if (step == nullptr) {
      return fail(ErrorCode::kUnsupported,
                  "{}: schema version {} cannot be brought to {} by this program; export it with "
                  "the program that wrote it and import that",
                  db.label(), from, schema.version);
    }
    auto done = db.exec(std::string(step->sql));
    if (!done) {
      return fail(done.error().code,
                  "{}: migrating from schema version {} to {} failed and was undone ({})",
                  db.label(), version, version + 1, done.error().message);
    }
  }
  F8_TRY(db.exec(fmt::format("PRAGMA user_version = {}", schema.version)));
  return transaction.commit();
}

}  // namespace f8::tuning_db
