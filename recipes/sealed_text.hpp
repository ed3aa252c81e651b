// Files of text lines that tell their kind and version, and whether they are whole:
//   sealed := MAGIC " " VERSION LF { line LF } "end " HASH LF
//   HASH   := hash_hex of all bytes before the word "end"
#pragma once

#include <string>
#include <string_view>

#include "base/error.hpp"

namespace f8 {

struct SealedKind {
  std::string_view magic;         // "float8-table"
  int version = 1;                // that is written
  int oldest = version;           // that is read
  std::string_view name;          // "tuning table", for messages
  std::string_view remedy;        // for another version: "export it again with this one"
  std::string_view made_by = {};  // the command that writes one
};

[[nodiscard]] std::string first_line(const SealedKind& kind);
// `body` begins with the first line.
[[nodiscard]] std::string seal(std::string body);
struct Unsealed {
  int version = 0;
  std::string_view lines;  // between the first one and the last
};
// The error is kUnsupported for another version, and kCorrupt for a text of another kind, one that is
// cut short and one that was changed.
[[nodiscard]] Result<Unsealed> unseal(const SealedKind& kind, std::string_view text);

// Reads a field of a line; `field` is its name for a message.
[[nodiscard]] Result<double> parse_positive(const char* field, std::string_view text);

}  // namespace f8
