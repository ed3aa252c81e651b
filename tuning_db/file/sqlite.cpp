// SQLite with errors as values: see sqlite.hpp.
#include "tuning_db/file/sqlite.hpp"

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "base/text.hpp"
#include "tuning_db/file/checksum.hpp"

namespace f8::tuning_db {
namespace {

constexpr int kBusyTimeoutMs = 10'000;
constexpr int kOperationsPerClock = 20'000;  // some milliseconds of SQLite's virtual machine

struct Limit {
  int id, value;
};
// Our own schema and statements stay far below these.
constexpr std::array kLimits = {
    Limit{SQLITE_LIMIT_LENGTH, kMaxValueBytes},
    Limit{SQLITE_LIMIT_SQL_LENGTH, 100'000},
    Limit{SQLITE_LIMIT_COLUMN, 200},
    Limit{SQLITE_LIMIT_EXPR_DEPTH, 100},
    Limit{SQLITE_LIMIT_COMPOUND_SELECT, 10},
    Limit{SQLITE_LIMIT_VDBE_OP, 100'000},
    Limit{SQLITE_LIMIT_ATTACHED, 1},  // VACUUM INTO attaches its target
    Limit{SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100},
    Limit{SQLITE_LIMIT_VARIABLE_NUMBER, 200},
    Limit{SQLITE_LIMIT_TRIGGER_DEPTH, 4},
    Limit{SQLITE_LIMIT_WORKER_THREADS, 0},
};
constexpr std::array kSwitches = {
    Limit{SQLITE_DBCONFIG_DEFENSIVE, 1},
    Limit{SQLITE_DBCONFIG_ENABLE_VIEW, 0},
};

// SQLite takes "file:..." for a URI and ":memory:" or "" for no file, unless a folder stands in
// front.
std::string name_of(const std::filesystem::path& path) {
  return path.is_absolute() ? path.string() : "./" + path.string();
}

// An absolute path follows an empty authority, since "file://x" would name a host.
std::string immutable_uri_of(const std::filesystem::path& path) {
  std::string uri = path.is_absolute() ? "file://" : "file:";
  for (const char c : name_of(path)) {
    if (c == '%' || c == '?' || c == '#') {
      uri += f8::format("%{:02x}", static_cast<unsigned>(c));
    } else {
      uri += c;
    }
  }
  return uri + "?immutable=1";
}

int is_late(void* deadline) {
  return std::chrono::steady_clock::now() >
         *static_cast<const std::chrono::steady_clock::time_point*>(deadline);
}

// True where a copy failed because of what is copied, and not of where it goes.
bool is_about_reading(int code) {
  switch (code & 0xff) {
    case SQLITE_FULL:
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
    case SQLITE_READONLY:
      return false;
    case SQLITE_IOERR:
      return code == SQLITE_IOERR_READ || code == SQLITE_IOERR_SHORT_READ;
    default:
      return true;
  }
}

void note_change(void* changed, int /*operation*/, const char* /*database*/, const char* table,
                 sqlite3_int64 row) {
  (*static_cast<ChangedRows*>(changed))[table].push_back(row);
}

}  // namespace

Statement::Statement(Statement&& other) noexcept
    : owner_(other.owner_),
      statement_(std::exchange(other.statement_, nullptr)),
      next_(other.next_),
      bound_(other.bound_) {}

Statement::~Statement() {
  sqlite3_finalize(statement_);
}

void Statement::note_bound(int code) {
  if (bound_ == SQLITE_OK) bound_ = code;
}

void Statement::add(int64_t value) {
  note_bound(sqlite3_bind_int64(statement_, next_++, value));
}

void Statement::add(double value) {
  note_bound(sqlite3_bind_double(statement_, next_++, value));
}

void Statement::add(std::string_view value) {
  // An empty view may hold a null pointer, which would bind NULL.
  note_bound(sqlite3_bind_text64(statement_, next_++, value.empty() ? "" : value.data(),
                                 value.size(), SQLITE_TRANSIENT, SQLITE_UTF8));
}

void Statement::add_null() {
  note_bound(sqlite3_bind_null(statement_, next_++));
}

int Statement::step_code() {
  return bound_ == SQLITE_OK ? sqlite3_step(statement_) : bound_;
}

Result<bool> Statement::step() {
  const int code = step_code();
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
  bound_ = SQLITE_OK;
  owner_->start_clock();
}

int Statement::columns() const {
  return sqlite3_column_count(statement_);
}

std::string_view Statement::name(int column) const {
  const char* name = sqlite3_column_name(statement_, column);
  return name == nullptr ? "" : name;
}

void Statement::append_value(int column, std::string& bytes) const {
  sqlite3_value* value = sqlite3_column_value(statement_, column);
  const int type = sqlite3_value_type(value);
  bytes += static_cast<char>(type);
  std::array<char, 8> raw{};
  if (type == SQLITE_INTEGER) {
    raw = std::bit_cast<std::array<char, 8>>(sqlite3_value_int64(value));
  } else if (type == SQLITE_FLOAT) {
    raw = std::bit_cast<std::array<char, 8>>(sqlite3_value_double(value));
  } else if (type != SQLITE_NULL) {
    const auto* text = static_cast<const char*>(sqlite3_value_blob(value));
    const auto size = static_cast<size_t>(sqlite3_value_bytes(value));
    raw = std::bit_cast<std::array<char, 8>>(uint64_t{size});
    bytes.append(raw.data(), raw.size());
    bytes.append(text, text == nullptr ? 0 : size);
    return;
  }
  if (type != SQLITE_NULL) bytes.append(raw.data(), raw.size());
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
  return std::string(view(column));
}

std::string_view Statement::view(int column) const {
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
  if (immutable) return open_name(immutable_uri_of(path), flags | SQLITE_OPEN_URI, path.string());
  return open_name(name_of(path), flags, path.string());
}

Result<std::unique_ptr<Connection>> Connection::open_empty(std::string label) {
  return open_name(":memory:", SQLITE_OPEN_READWRITE, std::move(label));
}

Result<std::unique_ptr<Connection>> Connection::open_name(const std::string& name, int flags,
                                                          std::string label) {
  sqlite3_hard_heap_limit64(kMaxMemoryBytes);
  sqlite3* db = nullptr;
  const int code = sqlite3_open_v2(name.c_str(), &db,
                                   flags | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE, nullptr);
  // Given even when opening failed, to hold the message.
  std::unique_ptr<Connection> connection(new Connection(db, std::move(label)));
  if (code != SQLITE_OK) return connection->failure(code);
  F8_TRY(connection->configure());
  return connection;
}

Status Connection::configure() {
  sqlite3_busy_timeout(db_, kBusyTimeoutMs);
  for (const auto& [id, value] : kLimits) sqlite3_limit(db_, id, value);
  for (const auto& [id, value] : kSwitches) {
    const int code = sqlite3_db_config(db_, id, value, nullptr);
    if (code != SQLITE_OK) return failure(code);
  }
  sqlite3_progress_handler(db_, kOperationsPerClock, is_late, &deadline_);
  sqlite3_update_hook(db_, note_change, &changed_);
  return exec("PRAGMA foreign_keys=ON; PRAGMA cell_size_check=ON");
}

Result<std::unique_ptr<Connection>> Connection::open_bytes(std::span<const unsigned char> bytes,
                                                           std::string label) {
  auto connection = F8_TRY(open_empty(std::move(label)));
  // Sorting needs no file: where none can be written, the built-in database still answers.
  F8_TRY(connection->exec("PRAGMA temp_store=MEMORY"));
  // READONLY: SQLite does not write to the bytes, though its signature says it may.
  const auto size = static_cast<sqlite3_int64>(bytes.size());
  const int code =
      sqlite3_deserialize(connection->db_, "main", const_cast<unsigned char*>(bytes.data()), size,
                          size, SQLITE_DESERIALIZE_READONLY);
  if (code != SQLITE_OK) return connection->failure(code);
  return connection;
}

Result<std::unique_ptr<Connection>> Connection::copy_to_memory(const Connection& from) {
  auto to = F8_TRY(open_empty(from.label_));
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

Status Connection::vacuum_into(const std::filesystem::path& path,
                               const std::filesystem::path& name) const {
  auto statement = F8_TRY(prepare("VACUUM INTO ?"));
  const int code = statement.bind(name_of(path)).step_code();
  if (code == SQLITE_DONE) return {};
  return failure(code, is_about_reading(code) ? label_ : name.string());
}

Status Connection::exec(const std::string& sql) {
  start_clock();
  const int code = sqlite3_exec(db_, sql.c_str(), nullptr, nullptr, nullptr);
  if (code != SQLITE_OK) return failure(code);
  return {};
}

Result<Statement> Connection::prepare(std::string_view sql) const {
  start_clock();
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

Status Connection::enable_triggers(bool enabled) {
  const int code = sqlite3_db_config(db_, SQLITE_DBCONFIG_ENABLE_TRIGGER, int{enabled}, nullptr);
  if (code != SQLITE_OK) return failure(code);
  return {};
}

Status Connection::require_sole_user() {
  // A connection holds a lock as long as it is open, and leaving WAL takes all of them at once.
  const Status alone = exec("PRAGMA journal_mode=DELETE");
  if (!alone && (sqlite3_errcode(db_) & 0xff) == SQLITE_BUSY) {
    return fail(ErrorCode::kIo, "{}: another process has it open; try again when that has ended",
                label_);
  }
  F8_TRY(alone);
  return exec("PRAGMA journal_mode=WAL");
}

std::unexpected<Error> Connection::failure(int code, const std::string& name) const {
  // SQLite's words may quote the file's.
  const std::string said = quote(db_ == nullptr ? sqlite3_errstr(code) : sqlite3_errmsg(db_));
  const int system = db_ == nullptr ? 0 : sqlite3_system_errno(db_);
  switch (code & 0xff) {
    case SQLITE_FULL:
      return fail(
          ErrorCode::kIo,
          "{}: the disk is full, or the file as large as one may be; free some space or go on in "
          "another file: what was finished is kept",
          name);
    case SQLITE_TOOBIG:
      return fail(ErrorCode::kInvalidArgument,
                  "{}: a value or a row is longer than {} bytes, which no tuning database holds",
                  name, kMaxValueBytes);
    case SQLITE_INTERRUPT:
      return fail(ErrorCode::kUnsupported,
                  "{}: it took longer than {} s to answer and was given up; measure into a new "
                  "file, or merge fewer",
                  name, std::chrono::duration<double>(time_limit_).count());
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return fail(ErrorCode::kIo,
                  "{}: another process is writing to it (waited {} s); try again when it is done",
                  name, kBusyTimeoutMs / 1000);
    case SQLITE_IOERR:
      return fail(ErrorCode::kIo,
                  "{}: cannot read or write ({}, {}); see to the disk and try again: what was "
                  "finished is kept",
                  name, said, system == 0 ? "no system error" : std::strerror(system));
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
    case SQLITE_READONLY:
      return fail(ErrorCode::kIo, "{}: {}{}{}; check the permissions of the file and its folder",
                  name, said, system == 0 ? "" : ": ", system == 0 ? "" : std::strerror(system));
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return fail(ErrorCode::kCorrupt,
                  "{}: the database is damaged ({}); restore a copy, or measure into a new file",
                  name, said);
    case SQLITE_NOMEM:
      return fail(ErrorCode::kOutOfMemory,
                  "{}: out of memory; close other programs, or keep it in several databases", name);
    case SQLITE_CONSTRAINT:
      return fail(ErrorCode::kInvalidArgument, "{}: a row was refused ({})", name, said);
    default:
      return fail(ErrorCode::kInternal, "{}: SQLite error {} ({}); please report it", name, code,
                  said);
  }
}

Result<Transaction> Transaction::begin(Connection& connection) {
  F8_TRY(connection.exec("BEGIN IMMEDIATE"));
  connection.changed_.clear();
  return Transaction(&connection);
}

Transaction::~Transaction() {
  // Some errors (a full disk) have rolled back already; a second rollback would only say so.
  if (connection_ != nullptr && sqlite3_get_autocommit(connection_->db_) == 0) {
    (void)connection_->exec("ROLLBACK");
  }
}

Status Transaction::commit() {
  F8_TRY(store_checksums(*connection_, std::exchange(connection_->changed_, {})));
  F8_TRY(connection_->exec("COMMIT"));
  connection_ = nullptr;
  return {};
}

}  // namespace f8::tuning_db
