// Opening, creating and refusing database files.
//
// A file is judged by its kind, its size and its first 100 bytes before SQLite sees it, so that a file
// that is refused is not touched: not even a -shm is made next to it. Then its schema, its pages and
// its rows' checksums are checked, so that what a command reads is what was written. A new database is built under a temporary name
// and linked into place, so that no reader ever meets half a schema.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/file.hpp"
#include "base/log.hpp"
#include "tuning_db/file/checksum.hpp"
#include "tuning_db/rows.hpp"
#include "tuning_db/snapshot.hpp"
#include "tuning_db/state.hpp"
#include "tuning_db/validate.hpp"

namespace f8::tuning_db {
namespace {

constexpr uint32_t kApplicationId = 0x46384442;
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 30;  // some three million trials
// A database, and the files that SQLite puts next to it.
constexpr std::array<std::string_view, 4> kSuffixes = {"", "-wal", "-shm", "-journal"};
constexpr size_t kUuidChars = 36;
constexpr std::string_view kMagic("SQLite format 3\0", 16);

struct Header {  // of an SQLite file
  uint32_t page_bytes, pages, user_version, application_id;
  bool pages_valid;
};

bool has_wal(const fs::path& path) {
  std::error_code ignored;
  const auto size = fs::file_size(path.string() + "-wal", ignored);
  return !ignored && size > 0;
}

// A fifo or a device in place of the file, or of one that SQLite opens next to it, could make it wait
// for ever; a file that is too large, nearly so.
Status refuse_odd_files(const fs::path& path) {
  for (const std::string_view suffix : kSuffixes) {
    const std::string name = path.string() + std::string(suffix);
    struct stat info {};
    if (::stat(name.c_str(), &info) != 0) {
      if (errno == ENOENT && !suffix.empty()) continue;
      return fail(ErrorCode::kIo, "{}: cannot open it: {}; name another, or see to its permissions",
                  name, std::strerror(errno));
    }
    F8_TRY(check_kind(info.st_mode, name, Pipes::kRefused));
    const auto size = static_cast<uint64_t>(info.st_size);
    if (size > kMaxFileBytes) {
      return fail(ErrorCode::kUnsupported,
                  "{}: {} bytes; a tuning database has at most {}, so measure into another file",
                  name, size, kMaxFileBytes);
    }
  }
  return {};
}

Result<Header> read_header(const fs::path& path) {
  std::array<unsigned char, 100> bytes{};
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    return fail(ErrorCode::kIo, "{}: cannot open it: {}; name another, or see to its permissions",
                path.string(), std::strerror(errno));
  }
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (in.gcount() == 0) {
    return fail(ErrorCode::kCorrupt,
                "{}: the file is empty, not a float8 tuning database; remove it or name another",
                path.string());
  }
  if (in.gcount() < static_cast<std::streamsize>(bytes.size()) ||
      std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    const std::string_view is =
        known_as({reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(in.gcount())});
    if (!is.empty() && !is.starts_with("a database")) {
      return fail(ErrorCode::kInvalidArgument, "{} is {}", path.string(), is);
    }
    return fail(ErrorCode::kCorrupt,
                "{}: not an SQLite file, so not a float8 tuning database; name another file",
                path.string());
  }
  const auto u32 = [&bytes](size_t at) {
    return static_cast<uint32_t>(bytes[at]) << 24 | static_cast<uint32_t>(bytes[at + 1]) << 16 |
           static_cast<uint32_t>(bytes[at + 2]) << 8 | static_cast<uint32_t>(bytes[at + 3]);
  };
  const uint32_t page = static_cast<uint32_t>(bytes[16]) << 8 | bytes[17];
  return Header{.page_bytes = page == 1 ? 65536 : page,
                .pages = u32(28),
                .user_version = u32(60),
                .application_id = u32(68),
                .pages_valid = u32(24) == u32(92)};
}

Status refuse_newer(const fs::path& path, int64_t version, int known) {
  if (version <= known) return {};
  return fail(
      ErrorCode::kUnsupported,
      "{}: its schema version is {}, this program knows {}; use the newer float8 that wrote "
      "it",
      path.string(), version, known);
}

Status judge(const fs::path& path, int known) {
  F8_TRY(refuse_odd_files(path));
  const Header header = F8_TRY(read_header(path));
  if (header.application_id != kApplicationId) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: an SQLite database of another program (application_id {:#x}), not a float8 "
                "tuning database; name another file",
                path.string(), header.application_id);
  }
  F8_TRY(refuse_newer(path, header.user_version, known));
  // With a -wal the file may lag behind its header in a checkpoint that was cut short.
  if (header.pages_valid && !has_wal(path)) {
    std::error_code error;
    const auto size = fs::file_size(path, error);
    if (!error && size < uint64_t{header.pages} * header.page_bytes) {
      return fail(ErrorCode::kCorrupt,
                  "{}: truncated ({} bytes of {}); restore a copy, or measure into a new file",
                  path.string(), size, uint64_t{header.pages} * header.page_bytes);
    }
  }
  return {};
}

// NAME.new-UUID, and what SQLite puts next to it. Of a long name this is the beginning, so that ours is
// no longer than allowed.
std::string temporary_prefix(const fs::path& path) {
  constexpr size_t kLongest = 128;
  return path.filename().string().substr(0, kLongest) + ".new-";
}

// A name next to the database's; at the end it is removed, with what SQLite put next to it.
struct TemporaryName {
  fs::path path;
  std::array<std::string, kSuffixes.size()> all;
  explicit TemporaryName(const fs::path& beside)
      : path(beside.parent_path() / (temporary_prefix(beside) + new_uuid())) {
    for (size_t i = 0; i < all.size(); ++i) all[i] = path.string() + std::string(kSuffixes[i]);
  }
  TemporaryName(const TemporaryName&) = delete;
  TemporaryName& operator=(const TemporaryName&) = delete;
  ~TemporaryName() {
    for (const std::string& name : all) ::unlink(name.c_str());
  }
};

// Removes what killed processes left next to the database.
void remove_leftovers(const fs::path& path) {
  const std::string prefix = temporary_prefix(path);
  remove_stale_files(path.parent_path(), [&](std::string_view name) {
    if (name.size() < prefix.size() + kUuidChars || !name.starts_with(prefix)) return false;
    name.remove_prefix(prefix.size());
    return validate_uuid(name.substr(0, kUuidChars)) &&
           std::ranges::find(kSuffixes, name.substr(kUuidChars)) != kSuffixes.end();
  });
}

std::unexpected<Error> cannot_create(const fs::path& path) {
  return fail(ErrorCode::kIo, "{}: cannot create it: {}; see to the permissions of its folder",
              path.string(), std::strerror(errno));
}

Status create(const fs::path& path, const fs::path& folder, const SchemaSpec& schema) {
  if (::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    return cannot_create(path);
  }
  const TemporaryName temporary(path);
  {
    auto db = F8_TRY(Connection::open(temporary.path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE));
    auto transaction = F8_TRY(Transaction::begin(*db));
    F8_TRY(db->exec(std::string(schema.sql)));
    F8_TRY(transaction.commit());
    F8_TRY(db->exec("PRAGMA journal_mode=WAL"));
  }
  if (::link(temporary.path.c_str(), path.c_str()) == 0 || errno == EEXIST) return {};
  // Some file systems have no hard links; there the last of two creators wins, both empty.
  if (::rename(temporary.path.c_str(), path.c_str()) == 0) return {};
  return cannot_create(path);
}

Result<std::unique_ptr<Connection>> connect_to_read(const fs::path& path) {
  if (refuse_network_fs(path, fs_magic(path))) {
    // A connection that may write, though none of ours does: only such a one removes the -wal and
    // -shm that WAL puts next to the file while it is read. Of a write-protected file SQLite makes a
    // reader.
    for (const int flags : {SQLITE_OPEN_READWRITE, SQLITE_OPEN_READONLY}) {
      auto db = Connection::open(path, flags);
      if (!db) continue;
      const auto version = (*db)->scalar("PRAGMA user_version");
      if (version) return db;
      if (version.error().code != ErrorCode::kIo) return std::unexpected(version.error());
    }
  }
  // Neither a folder that cannot be written nor a network takes a -shm. Without one only the file
  // itself is read.
  if (has_wal(path)) {
    return fail(ErrorCode::kIo,
                "{}: its newest rows are in {}-wal, which cannot be read from here; open it where "
                "it was written, or export it there",
                path.string(), path.string());
  }
  return Connection::open(path, SQLITE_OPEN_READONLY, /*immutable=*/true);
}

// What is written can be opened again: beyond that size SQLite says that the disk is full.
Status limit_size(Connection& db) {
  const int64_t page_bytes = F8_TRY(db.scalar("PRAGMA page_size"));
  return db.exec(
      f8::format("PRAGMA max_page_count = {}", static_cast<int64_t>(kMaxFileBytes) / page_bytes));
}

Status backup_and_migrate(Connection& db, const fs::path& path, int version,
                          const SchemaSpec& schema) {
  const Result<fs::path> backup = back_up(db, path, f8::format("v{}", version));
  if (!backup) {
    return fail(backup.error().code, "cannot back up before migrating, nothing was changed: {}",
                backup.error().message);
  }
  F8_TRY(migrate(db, version, schema));
  log_warning("{}: migrated from schema version {} to {}; the old one is {}", path.string(),
              version, schema.version, backup->string());
  return {};
}

}  // namespace

// The copy is linked to its name when it is complete, so a half one is never taken for a backup.
Result<fs::path> back_up(const Connection& db, const fs::path& path, std::string_view name) {
  const TemporaryName temporary(path);
  F8_TRY(db.vacuum_into(temporary.path, path.string() + f8::format(".{}.backup", name)));
  for (int i = 1;; ++i) {
    const std::string number = i == 1 ? "" : std::to_string(i);
    const fs::path backup = path.string() + f8::format(".{}.backup{}", name, number);
    if (::link(temporary.path.c_str(), backup.c_str()) == 0) return backup;
    if (errno == EEXIST) continue;
    // Some file systems have no hard links.
    if (!fs::exists(backup) && ::rename(temporary.path.c_str(), backup.c_str()) == 0) return backup;
    return cannot_create(backup);
  }
}

Database Database::State::wrap(State state) {
  return Database(std::make_unique<State>(std::move(state)));
}

Status Database::State::require_writable() const {
  if (writable) return {};
  return fail(ErrorCode::kInvalidArgument, "{}: opened for reading; open it for writing", layer);
}

Result<Database> open_database(const fs::path& path, OpenMode mode, const SchemaSpec& schema) {
  if (path.empty()) {
    return fail(ErrorCode::kInvalidArgument, "the name of the database is empty; give a file");
  }
  const bool writable = mode != OpenMode::kReadOnly;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code error;
  if (!fs::exists(path, error)) {
    if (mode != OpenMode::kCreate) {
      return fail(
          ErrorCode::kNotFound,
          "{}: no such database; check the path, or make one: `float8-tune sweep` measures, "
          "`db import` and `db merge` take what was measured elsewhere, each with --db {}",
          path.string(), path.string());
    }
    if (!fs::is_directory(folder, error)) {
      return fail(ErrorCode::kNotFound, "{}: the folder {} does not exist; create it first",
                  path.string(), folder.string());
    }
    F8_TRY(refuse_network_fs(path, fs_magic(folder)));
    F8_TRY(create(path, folder, schema));
  }
  F8_TRY(judge(path, schema.version));
  if (writable) F8_TRY(refuse_network_fs(path, fs_magic(path)));

  auto db = writable ? F8_TRY(Connection::open(path, SQLITE_OPEN_READWRITE))
                     : F8_TRY(connect_to_read(path));
  // Again, now with what a -wal holds, and before anything is written.
  const auto version = static_cast<int>(F8_TRY(db->scalar("PRAGMA user_version")));
  F8_TRY(refuse_newer(path, version, schema.version));
  F8_TRY(check_schema(*db, version, schema));
  const bool has_checksums = version >= kFirstWithChecksums;
  F8_TRY(check_integrity(*db, has_checksums ? Constraints::kIgnored : Constraints::kChecked));
  if (has_checksums) F8_TRY(verify_checksums(*db));
  if (writable) {
    if (db->is_read_only()) {
      return fail(ErrorCode::kIo, "{}: the file is write-protected; change its permissions",
                  path.string());
    }
    // Uuids and keys are in no order, so an import touches all pages of their indexes: up to 64 MB are kept.
    F8_TRY(
        db->exec("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA cache_size=-65536"));
    F8_TRY(limit_size(*db));
    remove_leftovers(path);
  }
  if (version < schema.version) {
    if (writable) {
      F8_TRY(backup_and_migrate(*db, path, version, schema));
    } else {
      db = F8_TRY(Connection::copy_to_memory(*db));
      F8_TRY(migrate(*db, version, schema));
    }
  }
  return Database::State::wrap({std::move(db), path.string(), writable});
}

Result<Database> Database::open(const fs::path& path, OpenMode mode) {
  return open_database(path, mode, current_schema());
}

Database::Database(std::unique_ptr<State> state) : state_(std::move(state)) {}
Database::Database(Database&&) noexcept = default;
Database& Database::operator=(Database&&) noexcept = default;
Database::~Database() = default;

}  // namespace f8::tuning_db
