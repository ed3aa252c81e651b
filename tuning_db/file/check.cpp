// Database::check: the file's pages, rows and references are sound, every key is the key of its
// row, and every row can be read.
#include "base/text.hpp"
#include "tuning_db/file/checksum.hpp"
#include "tuning_db/rows.hpp"
#include "tuning_db/snapshot.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db {

namespace {

// The keys that the columns behind the first make.
Result<std::string> device_key(const Statement& s) {
  return key(F8_TRY(read_device(s, 1)));
}

Result<std::string> toolchain_key(const Statement& s) {
  return F8_TRY(read_toolchain(s, 1)).key();
}

Result<std::string> method_key(const Statement& s) {
  return Method{s.text(1), s.text(2)}.key();
}

Result<std::string> candidate_key(const Statement& s) {
  return F8_TRY(read_candidate(s, 1)).key();
}

Result<std::string> problem_key(const Statement& s) {
  const Problem p = F8_TRY(Problem::parse(s.text(0)));
  const bool same =
      to_string(p.op) == s.view(1) && p.recipe == s.view(2) && dims_json(p) == s.view(3);
  return same ? p.key() : "";
}

Status check_pages(const Connection& db) {
  auto integrity = F8_TRY(db.prepare("PRAGMA integrity_check(1)"));
  while (F8_TRY(integrity.step())) {
    if (integrity.view(0) == "ok") continue;
    // A page for which there was no memory is a finding too, with SQLite's number for it.
    if (integrity.view(0).ends_with("error code=7")) return db.failure(SQLITE_NOMEM);
    return fail(ErrorCode::kCorrupt,
                "{}: the database is damaged ({}); restore a copy, or measure into a new file",
                db.label(), quote(integrity.view(0)));
  }
  return {};
}

Status check_keys(const Connection& db, std::string_view table, std::string_view columns,
                  Result<std::string> (*key_of)(const Statement&)) {
  auto select = F8_TRY(db.prepare(f8::format("SELECT key, {}", columns)));
  while (F8_TRY(select.step())) {
    const Result<std::string> key = key_of(select);
    if (!key) return bad_row(db.label(), table, select.view(0), key.error());
    if (*key == select.view(0)) continue;
    return fail(ErrorCode::kCorrupt,
                "{}: the row of table {} with key {} has another key's fields; restore a copy, or "
                "measure into a new file",
                db.label(), table, quote(select.view(0), 80));
  }
  return {};
}

}  // namespace

Status check_integrity(Connection& db, Constraints constraints) {
  const bool ignored = constraints == Constraints::kIgnored;
  F8_TRY(db.exec(f8::format("PRAGMA ignore_check_constraints = {:d}", ignored)));
  const Status sound = check_pages(db);
  F8_TRY(db.exec("PRAGMA ignore_check_constraints = 0"));
  return sound;
}

Status Database::check() const {
  Connection& db = *state_->db;
  F8_TRY(check_schema(db, kSchemaVersion, current_schema()));
  F8_TRY(check_integrity(db, Constraints::kChecked));
  F8_TRY(verify_checksums(db));
  auto foreign = F8_TRY(db.prepare("PRAGMA foreign_key_check"));
  if (F8_TRY(foreign.step())) {
    return fail(
        ErrorCode::kCorrupt,
        "{}: row {} of table {} refers to no row of {}; restore a copy, or measure into a new file",
        db.label(), foreign.integer(1), foreign.text(0), foreign.text(2));
  }
  F8_TRY(check_keys(db, "device_class", f8::format("{} FROM device_class d", kDeviceColumns),
                    device_key));
  F8_TRY(check_keys(db, "toolchain", f8::format("{} FROM toolchain tc", kToolchainColumns),
                    toolchain_key));
  F8_TRY(check_keys(db, "method", "fidelity, spec FROM method", method_key));
  F8_TRY(check_keys(db, "candidate", "impl, config, source_hash FROM candidate", candidate_key));
  F8_TRY(check_keys(db, "problem", "op, recipe, dims FROM problem", problem_key));
  F8_TRY(read_snapshot(db));
  F8_TRY(runs());
  return {};
}

}  // namespace f8::tuning_db
