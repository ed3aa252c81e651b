// SQLite with errors as values. A Connection names its file in every error; a Statement must not
// outlive its Connection; a Transaction that is not committed rolls back.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace f8::tuning_db {

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

  [[nodiscard]] bool is_null(int column) const;
  [[nodiscard]] int64_t integer(int column) const;
  [[nodiscard]] double real(int column) const;
  [[nodiscard]] std::string text(int column) const;  // "" for NULL
  [[nodiscard]] std::optional<int64_t> maybe_integer(int column) const;
  [[nodiscard]] std::optional<double> maybe_real(int column) const;

 private:
  friend class Connection;
  Statement(const Connection* owner, sqlite3_stmt* statement)
      : owner_(owner), statement_(statement) {}
  const Connection* owner_;
  sqlite3_stmt* statement_;
  int next_ = 1;
};

class Connection {
 public:
  // flags: SQLITE_OPEN_*. immutable: reads without locks or a -wal; the caller knows that nobody
  // writes.
  [[nodiscard]] static Result<std::unique_ptr<Connection>> open(const std::filesystem::path& path,
                                                                int flags, bool immutable = false);
  // A read-only database in memory over bytes that outlive it, without a copy.
  [[nodiscard]] static Result<std::unique_ptr<Connection>> open_bytes(
      std::span<const unsigned char> bytes, std::string label);
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
  // The error of the last failed call.
  [[nodiscard]] std::unexpected<Error> failure(int code) const;
  [[nodiscard]] const std::string& label() const { return label_; }

 private:
  friend class Transaction;
  Connection(sqlite3* db, std::string label) : db_(db), label_(std::move(label)) {}
  sqlite3* db_;
  std::string label_;
};

// BEGIN IMMEDIATE: the lock for writing is taken at once, so a commit never finds another writer.
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
