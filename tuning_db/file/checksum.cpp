// Row checksums: see checksum.hpp.
#include "tuning_db/file/checksum.hpp"

#include <algorithm>

#include "base/hash.hpp"

namespace f8::tuning_db {
namespace {

constexpr std::string_view kColumn = "checksum";

// The tables whose rows have checksums: in a schema that has them, all.
Result<std::vector<std::string>> tables_of(const Connection& db) {
  auto select =
      F8_TRY(db.prepare("SELECT m.name FROM sqlite_schema m JOIN pragma_table_info(m.name) c "
                        "WHERE m.type = 'table' AND c.name = ? ORDER BY m.rowid"));
  select.bind(kColumn);
  std::vector<std::string> tables;
  while (F8_TRY(select.step())) tables.push_back(select.text(0));
  return tables;
}

// Computes the checksums of the rows of one `SELECT *`.
class RowHash {
 public:
  RowHash(std::string_view table, const Statement& select) : table_(table), select_(select) {
    for (int c = 0; c < select.columns(); ++c) {
      if (select.name(c) == kColumn) column_ = c;
    }
  }
  [[nodiscard]] int64_t stored() const { return select_.integer(column_); }

  [[nodiscard]] int64_t computed() {
    bytes_ = table_;
    for (int c = 0; c < select_.columns(); ++c) {
      if (c == column_) continue;
      select_.append_value(c, bytes_);
    }
    return static_cast<int64_t>(hash64(bytes_));
  }

 private:
  std::string_view table_;
  const Statement& select_;
  int column_ = -1;
  std::string bytes_;
};

Status store_checksums(Connection& db, std::string_view table, std::vector<int64_t> rows) {
  std::ranges::sort(rows);
  const auto repeated = std::ranges::unique(rows);
  rows.erase(repeated.begin(), repeated.end());
  auto select = F8_TRY(db.prepare(f8::format("SELECT * FROM {} WHERE id = ?", table)));
  RowHash hash(table, select);
  auto update = F8_TRY(db.prepare(f8::format("UPDATE {} SET {} = ? WHERE id = ?", table, kColumn)));
  for (const int64_t id : rows) {
    if (!F8_TRY(select.bind(id).step())) continue;  // deleted again
    const int64_t checksum = hash.computed();
    if (checksum == hash.stored()) continue;
    select.reset();
    F8_TRY(update.bind(checksum, id).run());
  }
  return {};
}

}  // namespace

Status store_checksums(Connection& db, const ChangedRows& changed) {
  // They would pass each of these updates, at the price of a journal of it.
  const WithoutTriggers quick(db);
  F8_TRY(quick.status());
  for (const std::string& table : F8_TRY(tables_of(db))) {
    const auto found = changed.find(table);
    if (found != changed.end()) F8_TRY(store_checksums(db, table, found->second));
  }
  return {};
}

Status store_all_checksums(Connection& db) {
  for (const std::string& table : F8_TRY(tables_of(db))) {
    std::vector<int64_t> rows;
    {
      auto select = F8_TRY(db.prepare(f8::format("SELECT id FROM {}", table)));
      while (F8_TRY(select.step())) rows.push_back(select.integer(0));
    }
    F8_TRY(store_checksums(db, table, std::move(rows)));
  }
  return {};
}

Status verify_checksums(const Connection& db) {
  for (const std::string& table : F8_TRY(tables_of(db))) {
    auto select = F8_TRY(db.prepare(f8::format("SELECT * FROM {}", table)));
    RowHash hash(table, select);
    while (F8_TRY(select.step())) {
      if (hash.computed() == hash.stored()) continue;
      return fail(
          ErrorCode::kCorrupt,
          "{}: row {} of table {} is not as float8 wrote it (its checksum differs); restore "
          "a copy, or measure into a new file",
          db.label(), select.integer(0), table);
    }
  }
  return {};
}

}  // namespace f8::tuning_db
