// The schema of a file against the one that its version has: the same tables, indexes and triggers
// with the same text, and nothing else. A view in place of a table, a trigger or an index of another
// program, a changed column or check are refused before any of them is used.
//
// Two texts are equal if their tokens are: comments, white space and needless quotes do not count,
// since ALTER TABLE writes them in its own way.
#include <map>
#include <utility>

#include "base/hash.hpp"
#include "base/text.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db {
namespace {

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

// The end of what `close` closes, from `at` on.
size_t end_of(std::string_view sql, size_t at, std::string_view close) {
  const size_t found = sql.find(close, at);
  return found == std::string_view::npos ? sql.size() : found + close.size();
}

// The tokens with a space only between two words.
std::string normalized(std::string_view sql) {
  std::string text;
  bool gap = false;
  const auto append = [&](std::string_view token) {
    if (gap && !text.empty() && is_word(text.back()) && is_word(token.front())) text += ' ';
    gap = false;
    text += token;
  };
  for (size_t i = 0; i < sql.size();) {
    const size_t begin = i;
    if (is_space(sql[i])) {
      ++i;
      gap = true;
    } else if (sql.substr(i).starts_with("--") || sql.substr(i).starts_with("/*")) {
      i = end_of(sql, i + 2, sql[i] == '-' ? "\n" : "*/");
      gap = true;
    } else if (sql[i] == '\'' || sql[i] == '"') {
      i = end_of(sql, i + 1, sql.substr(i, 1));
      std::string_view token = sql.substr(begin, i - begin);
      const std::string_view inner = token.substr(1, token.size() < 2 ? 0 : token.size() - 2);
      const bool plain = inner.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") == inner.npos;
      if (sql[begin] == '"' && !inner.empty() && plain) token = inner;
      append(token);
      gap = gap || token == inner;
    } else {
      append(sql.substr(i++, 1));
    }
  }
  return text;
}

// Normalised text by "table trial" and the like.
using SchemaObjects = std::map<std::string, std::string>;

Result<SchemaObjects> read_objects(const Connection& db) {
  SchemaObjects objects;
  auto select = F8_TRY(db.prepare("SELECT type, name, tbl_name, sql FROM sqlite_schema"));
  while (F8_TRY(select.step())) {
    std::string text = f8::format("on {}: {}", select.view(2), normalized(select.view(3)));
    const auto [object, is_new] =
        objects.emplace(f8::format("{} {}", select.view(0), select.view(1)), std::move(text));
    if (!is_new) object->second += " twice";
  }
  return objects;
}

// The first object that one of them lacks or has in another form; "" where they are equal.
std::string difference(const SchemaObjects& found, const SchemaObjects& expected) {
  for (const auto& [name, text] : found) {
    const auto own = expected.find(name);
    if (own == expected.end()) return quote(name, 80) + " does not belong to it";
    if (own->second != text) return quote(name, 80) + " is defined in another way";
  }
  for (const auto& [name, text] : expected) {
    if (!found.contains(name)) return quote(name, 80) + " is missing";
  }
  return {};
}

std::string fingerprint(const SchemaObjects& objects) {
  std::string all;
  for (const auto& [name, text] : objects) all += f8::format("{} {}\n", name, text);
  return hash_hex(all);
}

}  // namespace

Result<std::string> schema_fingerprint(const Connection& db) {
  return fingerprint(F8_TRY(read_objects(db)));
}

Status check_schema(const Connection& db, int version, const SchemaSpec& schema) {
  const SchemaObjects found = F8_TRY(read_objects(db));
  std::string differs;
  if (version == schema.version) {
    auto fresh = F8_TRY(Connection::open_empty(db.label()));
    F8_TRY(fresh->exec(std::string(schema.sql)));
    differs = difference(found, F8_TRY(read_objects(*fresh)));
  } else {
    const Migration& step = *F8_TRY(find_step(schema, version, db.label()));
    if (fingerprint(found) != step.fingerprint) differs = "a table, an index or a trigger differs";
  }
  if (differs.empty()) return {};
  return fail(ErrorCode::kCorrupt,
              "{}: not the schema of version {}: {}; restore a copy, or measure into a new file",
              db.label(), version, differs);
}

}  // namespace f8::tuning_db
