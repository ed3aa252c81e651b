// Schema versions and the steps between them. A step is SQL that takes version N to N + 1; all
// steps run in one transaction, after open.cpp has put a backup next to the file.
#include <array>

#include "tuning_db/file/checksum.hpp"
#include "tuning_db/rows.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db::text {
extern const std::string_view schema_sql;
}

namespace f8::tuning_db {
namespace {

// Version 2: the implementation is one of a set; the time of a screening and the kernels of a
// linear have columns.
constexpr std::string_view kToVersion2 = R"(
CREATE TABLE candidate_of_version_2 (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  impl TEXT NOT NULL CHECK (impl IN ('generated', 'cublaslt', 'bf16_cublaslt', 'float8', 'bf16')),
  config TEXT NOT NULL CHECK (json_valid(config)),
  source_hash TEXT NOT NULL
) STRICT;
INSERT INTO candidate_of_version_2 SELECT id, key, impl, config, source_hash FROM candidate;
DROP TABLE candidate;
ALTER TABLE candidate_of_version_2 RENAME TO candidate;
ALTER TABLE trial ADD COLUMN screened_ns REAL CHECK (screened_ns > 0);
ALTER TABLE trial ADD COLUMN kernel_output TEXT
  CHECK (kernel_output GLOB 'generated:?*' OR kernel_output GLOB 'cublaslt:h?*');
ALTER TABLE trial ADD COLUMN kernel_grad_input TEXT
  CHECK (kernel_grad_input GLOB 'generated:?*' OR kernel_grad_input GLOB 'cublaslt:h?*');
ALTER TABLE trial ADD COLUMN kernel_grad_weight TEXT
  CHECK (kernel_grad_weight GLOB 'generated:?*' OR kernel_grad_weight GLOB 'cublaslt:h?*');
DROP TRIGGER trial_is_final;
)";
constexpr const char* kTrialIsFinal = R"(
CREATE TRIGGER trial_is_final BEFORE UPDATE ON trial WHEN OLD.state NOT IN ('planned', 'running')
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never changed');
END)";

Status fill_columns_of_version_2(Connection& db) {
  {
    auto select = F8_TRY(db.prepare("SELECT id, state, reason FROM trial WHERE reason <> ''"));
    auto update =
        F8_TRY(db.prepare("UPDATE trial SET reason = ?, screened_ns = ?, kernel_output = ?, "
                          "kernel_grad_input = ?, kernel_grad_weight = ? WHERE id = ?"));
    while (F8_TRY(select.step())) {
      TrialResult result{.state = F8_TRY(parse_trial_state(select.text(1))),
                         .reason = select.text(2)};
      take_data_from_reason(result);
      if (!result.screened_ns && result.kernels.empty()) continue;
      update.bind();
      result.reason.empty() ? update.add_null() : update.add(result.reason);
      update.add(result.screened_ns);
      for (const Gemm g : kGemms) {
        const PartKernel* kernel = find_kernel(result.kernels, to_string(g));
        kernel != nullptr ? update.add(to_string(*kernel)) : update.add_null();
      }
      update.add(select.integer(0));
      F8_TRY(update.run());
    }
  }
  return db.exec(kTrialIsFinal);
}

// Version 3: every row has a checksum, and storing it is the one change that a finished trial takes.
constexpr std::string_view kToVersion3 = R"(
ALTER TABLE device_class ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE device_unit ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE toolchain ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE method ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE problem ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE candidate ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE run ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE trial ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0;
DROP TRIGGER trial_is_final;
CREATE TRIGGER trial_is_final BEFORE UPDATE ON trial
WHEN OLD.state NOT IN ('planned', 'running') AND OLD.checksum = NEW.checksum
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never changed');
END;
)";

// Version 4: a problem has the dims of its operation and today's key, a trial names a kernel for each
// part of its operation, and the program alone knows the names of operations and implementations.
constexpr std::string_view kToVersion4 = R"(
CREATE TABLE candidate_of_version_4 (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  impl TEXT NOT NULL,
  config TEXT NOT NULL CHECK (json_valid(config)),
  source_hash TEXT NOT NULL,
  checksum INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO candidate_of_version_4
  SELECT id, key, impl, config, source_hash, checksum FROM candidate;
DROP TABLE candidate;
ALTER TABLE candidate_of_version_4 RENAME TO candidate;
CREATE TABLE problem_of_version_4 (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  op TEXT NOT NULL,
  recipe TEXT NOT NULL,
  dims TEXT NOT NULL CHECK (json_valid(dims)),
  checksum INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE trial_kernel (
  id INTEGER PRIMARY KEY,
  trial_id INTEGER NOT NULL REFERENCES trial(id) ON DELETE CASCADE,
  part TEXT NOT NULL,
  provider TEXT NOT NULL,
  config TEXT NOT NULL,
  checksum INTEGER NOT NULL DEFAULT 0,
  UNIQUE (trial_id, part)
) STRICT;
WITH taken AS (
  SELECT id, 'output' AS part, kernel_output AS kernel FROM trial UNION ALL
  SELECT id, 'grad_input', kernel_grad_input FROM trial UNION ALL
  SELECT id, 'grad_weight', kernel_grad_weight FROM trial)
INSERT INTO trial_kernel (trial_id, part, provider, config)
  SELECT id, part, substr(kernel, 1, instr(kernel, ':') - 1), substr(kernel, instr(kernel, ':') + 1)
  FROM taken WHERE kernel IS NOT NULL;
ALTER TABLE trial DROP COLUMN kernel_output;
ALTER TABLE trial DROP COLUMN kernel_grad_input;
ALTER TABLE trial DROP COLUMN kernel_grad_weight;
CREATE TRIGGER trial_kernel_is_final BEFORE UPDATE ON trial_kernel WHEN OLD.checksum = NEW.checksum
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never changed');
END;
CREATE TRIGGER trial_kernel_is_kept BEFORE DELETE ON trial_kernel
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never deleted');
END;
)";

Status spell_keys_of_version_4(Connection& db) {
  {
    auto select = F8_TRY(db.prepare("SELECT id, key FROM problem"));
    auto insert = F8_TRY(db.prepare(
        "INSERT INTO problem_of_version_4 (id, key, op, recipe, dims) VALUES (?, ?, ?, ?, ?)"));
    while (F8_TRY(select.step())) {
      const Problem problem = F8_TRY(Problem::parse(select.text(1)));
      F8_TRY(insert
                 .bind(select.integer(0), problem.key(), to_string(problem.op), problem.recipe,
                       dims_json(problem))
                 .run());
    }
  }
  return db.exec(
      "DROP TABLE problem; ALTER TABLE problem_of_version_4 RENAME TO problem;"
      "CREATE INDEX problem_recipe ON problem (recipe, op)");
}

// Version 5: trials of attention have their accuracy.
constexpr std::string_view kToVersion5 = R"(
CREATE TABLE accuracy (
  id INTEGER PRIMARY KEY,
  trial_id INTEGER NOT NULL REFERENCES trial(id) ON DELETE CASCADE,
  data TEXT NOT NULL,
  tensor TEXT NOT NULL,
  sqnr_db REAL NOT NULL,
  cosine REAL NOT NULL,
  rmse REAL NOT NULL,
  checksum INTEGER NOT NULL DEFAULT 0,
  UNIQUE (trial_id, data, tensor)
) STRICT;
CREATE TRIGGER accuracy_is_final BEFORE UPDATE ON accuracy WHEN OLD.checksum = NEW.checksum
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never changed');
END;
CREATE TRIGGER accuracy_is_kept BEFORE DELETE ON accuracy
BEGIN
  SELECT RAISE(ABORT, 'a finished trial is never deleted');
END;
)";

// Foreign keys cannot be switched within a transaction.
class WithoutForeignKeys {
 public:
  explicit WithoutForeignKeys(Connection& db) : db_(db) {
    status_ = db.exec("PRAGMA foreign_keys=OFF");
  }
  WithoutForeignKeys(const WithoutForeignKeys&) = delete;
  WithoutForeignKeys& operator=(const WithoutForeignKeys&) = delete;
  ~WithoutForeignKeys() { (void)db_.exec("PRAGMA foreign_keys=ON"); }
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  Connection& db_;
  Status status_;
};

Status run_step(Connection& db, const Migration& step) {
  F8_TRY(db.exec(std::string(step.sql)));
  if (step.then != nullptr) F8_TRY(step.then(db));
  return {};
}

}  // namespace

std::string_view Database::schema() {
  return text::schema_sql;
}

const SchemaSpec& current_schema() {
  // Version 1 is the first that was ever written, so no step leads to it.
  static constexpr std::array kSteps = {
      Migration{1, "8426647bad04da0e915450ee7b6447cf", kToVersion2, fill_columns_of_version_2},
      Migration{2, "dc8f55c793a7d75703d4a7b9db62e3e9", kToVersion3},
      Migration{3, "99f6930adf0b416acf6ab39757d90932", kToVersion4, spell_keys_of_version_4},
      Migration{4, "06eeb4ae3f57ebf8d9c1949b3124eddd", kToVersion5}};
  static const SchemaSpec schema{kSchemaVersion, Database::schema(), kSteps};
  return schema;
}

Result<const Migration*> find_step(const SchemaSpec& schema, int from, std::string_view label) {
  for (const Migration& m : schema.migrations) {
    if (m.from == from) return &m;
  }
  return fail(ErrorCode::kUnsupported,
              "{}: schema version {} cannot be brought to {} by this program; export it with the "
              "program that wrote it and import that",
              label, from, schema.version);
}

Status migrate(Connection& db, int from, const SchemaSpec& schema) {
  const WithoutForeignKeys unchecked(db);
  F8_TRY(unchecked.status());
  auto transaction = F8_TRY(Transaction::begin(db));
  // Another process may have migrated while this one waited for the lock.
  int version = static_cast<int>(F8_TRY(db.scalar("PRAGMA user_version")));
  if (version != from && version != schema.version) {
    return fail(ErrorCode::kIo, "{}: its schema changed from {} to {} meanwhile; try again",
                db.label(), from, version);
  }
  for (; version < schema.version; ++version) {
    const Migration* step = F8_TRY(find_step(schema, version, db.label()));
    const Status done = run_step(db, *step);
    if (!done) {
      return fail(done.error().code,
                  "{}: migrating from schema version {} to {} failed and was undone ({})",
                  db.label(), version, version + 1, done.error().message);
    }
  }
  F8_TRY(store_all_checksums(db));
  {
    auto dangling = F8_TRY(db.prepare("PRAGMA foreign_key_check"));
    if (F8_TRY(dangling.step())) {
      return fail(ErrorCode::kCorrupt,
                  "{}: migrating was undone, since row {} of table {} refers to no row of {}; "
                  "restore a copy",
                  db.label(), dangling.integer(1), dangling.text(0), dangling.text(2));
    }
  }
  F8_TRY(db.exec(f8::format("PRAGMA user_version = {}", schema.version)));
  return transaction.commit();
}

}  // namespace f8::tuning_db
