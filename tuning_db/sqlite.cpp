// SQLite with errors as values: see sqlite.hpp.
#include "tuning_db/sqlite.hpp"

#include <cstring>
#include <utility>

namespace f8::tuning_db {
namespace {

constexpr int kBusyTimeoutMs = 10'000;

// "file:" URIs give meaning to these.
std::string uri_of(const std::filesystem::path& path) {
  std::string uri = "file:";
  for (const char c : path.string()) {
    if (c == '%' || c == '?' || c == '#') {
      uri += f8::format("%{:02x}", static_cast<unsigned>(c));
    } else {
      uri += c;
    }
  }
  return uri + "?immutable=1";
}

}  // namespace

Statement::Statement(Statement&& other) noexcept
    : owner_(other.owner_),
      statement_(std::exchange(other.statement_, nullptr)),
      next_(other.next_) {}

Statement::~Statement() {
  sqlite3_finalize(statement_);
}

void Statement::add(int64_t value) {
  sqlite3_bind_int64(statement_, next_++, value);
}

void Statement::add(double value) {
  sqlite3_bind_double(statement_, next_++, value);
}

void Statement::add(std::string_view value) {
  // An empty view may hold a null pointer, which would bind NULL.
  sqlite3_bind_text64(statement_, next_++, value.empty() ? "" : value.data(), value.size(),
                      SQLITE_TRANSIENT, SQLITE_UTF8);
}

void Statement::add_null() {
  sqlite3_bind_null(statement_, next_++);
}

Result<bool> Statement::step() {
  const int code = sqlite3_step(statement_);
  if (code == SQLITE_ROW) return true;
  if (code == SQLITE_DONE) return false;
  return owner_->failure(code);
}

Status Statement::run() {
  F8_TRY(step());
  reset();
  return {};
}

void Statement::reset() {
  sqlite3_reset(statement_);
}

bool Statement::is_null(int column) const {
  return sqlite3_column_type(statement_, column) == SQLITE_NULL;
}

int64_t Statement::integer(int column) const {
  return sqlite3_column_int64(statement_, column);
}

double Statement::real(int column) const {
  return sqlite3_column_double(statement_, column);
}

std::string Statement::text(int column) const {
  const auto* bytes = reinterpret_cast<const char*>(sqlite3_column_text(statement_, column));
  if (bytes == nullptr) return {};
  return {bytes, static_cast<size_t>(sqlite3_column_bytes(statement_, column))};
}

std::optional<int64_t> Statement::maybe_integer(int column) const {
  if (is_null(column)) return std::nullopt;
  return integer(column);
}

std::optional<double> Statement::maybe_real(int column) const {
  if (is_null(column)) return std::nullopt;
  return real(column);
}

Result<std::unique_ptr<Connection>> Connection::open(const std::filesystem::path& path, int flags,
                                                     bool immutable) {
  sqlite3* db = nullptr;
  const std::string name = immutable ? uri_of(path) : path.string();
  const int uri = immutable ? SQLITE_OPEN_URI : 0;
  const int code = sqlite3_open_v2(
      name.c_str(), &db, flags | uri | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE, nullptr);
  // Given even when opening failed, to hold the message.
  std::unique_ptr<Connection> connection(new Connection(db, path.string()));
  if (code != SQLITE_OK) return connection->failure(code);
  sqlite3_busy_timeout(db, kBusyTimeoutMs);
  F8_TRY(connection->exec("PRAGMA foreign_keys=ON"));
  return connection;
}

Result<std::unique_ptr<Connection>> Connection::open_bytes(std::span<const unsigned char> bytes,
                                                           std::string label) {
  auto connection = F8_TRY(open(":memory:", SQLITE_OPEN_READWRITE));
  connection->label_ = std::move(label);
  // READONLY: SQLite does not write to the bytes, though its signature says it may.
  const auto size = static_cast<sqlite3_int64>(bytes.size());
  const int code =
      sqlite3_deserialize(connection->db_, "main", const_cast<unsigned char*>(bytes.data()), size,
                          size, SQLITE_DESERIALIZE_READONLY);
  if (code != SQLITE_OK) return connection->failure(code);
  return connection;
}

Result<std::unique_ptr<Connection>> Connection::copy_to_memory(const Connection& from) {
  auto to = F8_TRY(open(":memory:", SQLITE_OPEN_READWRITE));
  to->label_ = from.label_;
  sqlite3_backup* backup = sqlite3_backup_init(to->db_, "main", from.db_, "main");
  if (backup == nullptr) return to->failure(sqlite3_errcode(to->db_));
  const int code = sqlite3_backup_step(backup, -1);
  sqlite3_backup_finish(backup);
  if (code != SQLITE_DONE) return from.failure(code);
  return to;
}

Connection::~Connection() {
  sqlite3_close_v2(db_);
}

Status Connection::exec(const std::string& sql) {
  const int code = sqlite3_exec(db_, sql.c_str(), nullptr, nullptr, nullptr);
  if (code != SQLITE_OK) return failure(code);
  return {};
}

Result<Statement> Connection::prepare(std::string_view sql) const {
  sqlite3_stmt* statement = nullptr;
  const int code =
      sqlite3_prepare_v2(db_, sql.data(), static_cast<int>(sql.size()), &statement, nullptr);
  if (code != SQLITE_OK) return failure(code);
  return Statement(this, statement);
}

Result<int64_t> Connection::scalar(std::string_view sql) const {
  auto statement = F8_TRY(prepare(sql));
  if (!F8_TRY(statement.step())) {
    return fail(ErrorCode::kInternal, "{}: no row from \"{}\"", label_, sql);
  }
  return statement.integer(0);
}

bool Connection::is_read_only() const {
  return sqlite3_db_readonly(db_, "main") == 1;
}

int64_t Connection::changes() const {
  return sqlite3_changes64(db_);
}

int64_t Connection::last_id() const {
  return sqlite3_last_insert_rowid(db_);
}

std::unexpected<Error> Connection::failure(int code) const {
  const char* said = db_ == nullptr ? sqlite3_errstr(code) : sqlite3_errmsg(db_);
  const int system = db_ == nullptr ? 0 : sqlite3_system_errno(db_);
  switch (code & 0xff) {
    case SQLITE_FULL:
      return fail(ErrorCode::kIo,
                  "{}: the disk is full; free some space and try again: what was finished is kept",
                  label_);
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return fail(ErrorCode::kIo,
                  "{}: another process is writing to it (waited {} s); try again when it is done",
                  label_, kBusyTimeoutMs / 1000);
    case SQLITE_IOERR:
      return fail(ErrorCode::kIo,
                  "{}: cannot read or write ({}, {}); see to the disk and try again: what was "
                  "finished is kept",
                  label_, said, system == 0 ? "no system error" : std::strerror(system));
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
    case SQLITE_READONLY:
      return fail(ErrorCode::kIo, "{}: {}{}{}; check the permissions of the file and its folder",
                  label_, said, system == 0 ? "" : ": ", system == 0 ? "" : std::strerror(system));
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return fail(ErrorCode::kCorrupt,
                  "{}: the database is damaged ({}); restore a copy, or measure into a new file",
                  label_, said);
    case SQLITE_NOMEM:
      return fail(ErrorCode::kOutOfMemory, "{}: out of memory", label_);
    case SQLITE_CONSTRAINT:
      return fail(ErrorCode::kInvalidArgument, "{}: a row was refused ({})", label_, said);
    default:
      return fail(ErrorCode::kInternal, "{}: SQLite error {} ({})", label_, code, said);
  }
}

Result<Transaction> Transaction::begin(Connection& connection) {
  F8_TRY(connection.exec("BEGIN IMMEDIATE"));
  return Transaction(&connection);
}

Transaction::~Transaction() {
  // Some errors (a full disk) have rolled back already; a second rollback would only say so.
  if (connection_ != nullptr && sqlite3_get_autocommit(connection_->db_) == 0) {
    (void)connection_->exec("ROLLBACK");
  }
}

Status Transaction::commit() {
  F8_TRY(connection_->exec("COMMIT"));
  connection_ = nullptr;
  return {};
}

}  // namespace f8::tuning_db
