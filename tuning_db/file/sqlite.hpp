// SQLite with errors as values. A Connection names its file in every error; a Statement must not
// outlive its Connection; a Transaction that is not committed rolls back.
//
// A file may come from a stranger, so every connection has limits: on the length of a value and of
// a statement, on the time of one execution, on memory. Views are switched off, and open.cpp compares
// the schema before it runs anything of it. A path is always the name of a file, never a URI.
#pragma once

#include <sqlite3.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace f8::tuning_db {

constexpr int kMaxValueBytes = 1 << 20;  // of a value and of a whole row
constexpr std::chrono::seconds kMaxStatementTime{60};
constexpr int64_t kMaxMemoryBytes = int64_t{3} << 30;  // of SQLite, in the whole process

class Connection;

class Statement {
 public:
  Statement(Statement&& other) noexcept;
  Statement& operator=(Statement&&) = delete;
  ~Statement();

  // Binds all parameters in order. Text is copied; a NaN and an empty optional become NULL.
  template <class... Args>
  Statement& bind(const Args&... args) {
    reset();
    next_ = 1;
    (add(args), ...);
    return *this;
  }
  // Appends one parameter; for lists whose length bind() cannot spell.
  void add(int64_t value);
  void add(int value) { add(int64_t{value}); }
  void add(bool value) { add(int64_t{value}); }
  void add(double value);
  void add(std::string_view value);
  void add(const std::string& value) { add(std::string_view(value)); }
  void add(const char* value) { add(std::string_view(value)); }
  template <class T>
  void add(const std::optional<T>& value) {
    value ? add(*value) : add_null();
  }
  void add_null();

  [[nodiscard]] Result<bool> step();  // true: a row
  [[nodiscard]] Status run();         // for statements without rows
  void reset();

  [[nodiscard]] int columns() const;
  [[nodiscard]] std::string_view name(int column) const;
  // Appends SQLite's number of the value's type as a byte, then the eight bytes of an integer or a
  // double, or those of a text's length and the text; little-endian. Checksums are made of these
  // bytes, so they are a part of the file format.
  void append_value(int column, std::string& bytes) const;
  [[nodiscard]] bool is_null(int column) const;
  [[nodiscard]] int64_t integer(int column) const;
  [[nodiscard]] double real(int column) const;
  [[nodiscard]] std::string text(int column) const;  // "" for NULL
  // The same text without a copy, valid until the next step.
  [[nodiscard]] std::string_view view(int column) const;
  [[nodiscard]] std::optional<int64_t> maybe_integer(int column) const;
  [[nodiscard]] std::optional<double> maybe_real(int column) const;

 private:
  friend class Connection;
  [[nodiscard]] int step_code();
  Statement(const Connection* owner, sqlite3_stmt* statement)
      : owner_(owner), statement_(statement) {}
  void note_bound(int code);
  const Connection* owner_;
  sqlite3_stmt* statement_;
  int next_ = 1;
  int bound_ = SQLITE_OK;  // the first error of binding
};

// Row ids by table.
using ChangedRows = std::map<std::string, std::vector<int64_t>, std::less<>>;

class Connection {
 public:
  // flags: SQLITE_OPEN_*. immutable: reads without locks or a -wal; the caller knows that nobody
  // writes.
  [[nodiscard]] static Result<std::unique_ptr<Connection>> open(const std::filesystem::path& path,
                                                                int flags, bool immutable = false);
  // A read-only database in memory over bytes that outlive it, without a copy.
  [[nodiscard]] static Result<std::unique_ptr<Connection>> open_bytes(
      std::span<const unsigned char> bytes, std::string label);
  // An empty database in memory.
  [[nodiscard]] static Result<std::unique_ptr<Connection>> open_empty(std::string label);
  // A private copy of `from` in memory.
  [[nodiscard]] static Result<std::unique_ptr<Connection>> copy_to_memory(const Connection& from);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  [[nodiscard]] Status exec(const std::string& sql);
  [[nodiscard]] Result<Statement> prepare(std::string_view sql) const;
  [[nodiscard]] Result<int64_t> scalar(
      std::string_view sql) const;          // first column of the first row
  [[nodiscard]] bool is_read_only() const;  // SQLite opens a write-protected file so
  [[nodiscard]] int64_t changes() const;    // of the last statement
  [[nodiscard]] int64_t last_id() const;
  // Triggers of this connection alone; other connections, and the file, keep theirs.
  [[nodiscard]] Status enable_triggers(bool enabled);
  // Refuses a file that another connection has open, as a reader or a writer.
  [[nodiscard]] Status require_sole_user();
  // Writes a compact copy to `path`, which does not exist or is empty. An error of writing is about
  // `name`.
  [[nodiscard]] Status vacuum_into(const std::filesystem::path& path,
                                   const std::filesystem::path& name) const;
  // The time that each execution of a statement may take from now on.
  void limit_time(std::chrono::milliseconds limit) { time_limit_ = limit; }
  // The error of the last failed call, about the database.
  [[nodiscard]] std::unexpected<Error> failure(int code) const { return failure(code, label_); }
  [[nodiscard]] const std::string& label() const { return label_; }

 private:
  friend class Statement;
  friend class Transaction;
  Connection(sqlite3* db, std::string label) : db_(db), label_(std::move(label)) {}
  [[nodiscard]] static Result<std::unique_ptr<Connection>> open_name(const std::string& name,
                                                                     int flags, std::string label);
  [[nodiscard]] Status configure();
  [[nodiscard]] std::unexpected<Error> failure(int code, const std::string& name) const;
  void start_clock() const { deadline_ = std::chrono::steady_clock::now() + time_limit_; }

  sqlite3* db_;
  std::string label_;
  std::chrono::milliseconds time_limit_ = kMaxStatementTime;
  mutable std::chrono::steady_clock::time_point deadline_;
  ChangedRows changed_;  // in the transaction that is open
};

// Switches triggers on again whatever happens.
class WithoutTriggers {
 public:
  explicit WithoutTriggers(Connection& db) : db_(db), status_(db.enable_triggers(false)) {}
  WithoutTriggers(const WithoutTriggers&) = delete;
  WithoutTriggers& operator=(const WithoutTriggers&) = delete;
  ~WithoutTriggers() { (void)db_.enable_triggers(true); }
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  Connection& db_;
  Status status_;
};

// BEGIN IMMEDIATE: the lock for writing is taken at once, so a commit never finds another writer.
// commit() stores the checksums of the rows that the transaction has changed (checksum.hpp).
class Transaction {
 public:
  [[nodiscard]] static Result<Transaction> begin(Connection& connection);
  Transaction(Transaction&& other) noexcept : connection_(other.connection_) {
    other.connection_ = nullptr;
  }
  Transaction& operator=(Transaction&&) = delete;
  ~Transaction();
  [[nodiscard]] Status commit();

 private:
  explicit Transaction(Connection* connection) : connection_(connection) {}
  Connection* connection_;
};

}  // namespace f8::tuning_db
