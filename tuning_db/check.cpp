// Database::check: the file's pages, rows and references are sound, every key is the key of its
// row, and every row can be read.
#include "base/text.hpp"
#include "tuning_db/checksum.hpp"
#include "tuning_db/rows.hpp"
#include "tuning_db/snapshot.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db {

Status check_integrity(const Connection& db, int version) {
  auto integrity = F8_TRY(db.prepare("PRAGMA integrity_check(1)"));
  while (F8_TRY(integrity.step())) {
    if (integrity.view(0) == "ok") continue;
    return fail(ErrorCode::kCorrupt,
                "{}: the database is damaged ({}); restore a copy, or measure into a new file",
                db.label(), quote(integrity.view(0)));
  }
  return version < kFirstWithChecksums ? Status() : verify_checksums(db);
}

Status Database::check() const {
  const Connection& db = *state_->db;
  F8_TRY(check_schema(db, kSchemaVersion, current_schema()));
  F8_TRY(check_integrity(db, kSchemaVersion));
  auto foreign = F8_TRY(db.prepare("PRAGMA foreign_key_check"));
  if (F8_TRY(foreign.step())) {
    return fail(ErrorCode::kCorrupt, "{}: row {} of table {} refers to no row of {}", db.label(),
                foreign.integer(1), foreign.text(0), foreign.text(2));
  }
  const auto wrong_key = [&db](std::string_view table, const std::string& key) -> Status {
    return fail(ErrorCode::kCorrupt, "{}: the row of table {} with key {} has another key's fields",
                db.label(), table, quote(key));
  };
  auto device =
      F8_TRY(db.prepare(f8::format("SELECT d.key, {} FROM device_class d", kDeviceColumns)));
  while (F8_TRY(device.step())) {
    if (device.text(0) != F8_TRY(read_device(device, 1)).key()) {
      return wrong_key("device_class", device.text(0));
    }
  }
  auto toolchain =
      F8_TRY(db.prepare(f8::format("SELECT tc.key, {} FROM toolchain tc", kToolchainColumns)));
  while (F8_TRY(toolchain.step())) {
    if (toolchain.text(0) != F8_TRY(read_toolchain(toolchain, 1)).key()) {
      return wrong_key("toolchain", toolchain.text(0));
    }
  }
  auto method = F8_TRY(db.prepare("SELECT key, fidelity, spec FROM method"));
  while (F8_TRY(method.step())) {
    if (method.text(0) != Method{method.text(1), method.text(2)}.key()) {
      return wrong_key("method", method.text(0));
    }
  }
  auto candidate = F8_TRY(db.prepare("SELECT key, impl, config, source_hash FROM candidate"));
  while (F8_TRY(candidate.step())) {
    if (candidate.text(0) != F8_TRY(read_candidate(candidate, 1)).key()) {
      return wrong_key("candidate", candidate.text(0));
    }
  }
  auto problem = F8_TRY(db.prepare("SELECT key, op, recipe, m, n, k FROM problem"));
  while (F8_TRY(problem.step())) {
    const Problem p = F8_TRY(Problem::parse(problem.text(0)));
    const Shape shape{problem.integer(3), problem.integer(4), problem.integer(5)};
    if (to_string(p.op) != problem.text(1) || p.recipe != problem.text(2) || p.shape != shape) {
      return wrong_key("problem", problem.text(0));
    }
  }
  F8_TRY(read_snapshot(db));
  F8_TRY(runs());
  return {};
}

}  // namespace f8::tuning_db
