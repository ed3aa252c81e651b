// Files of text lines that say what they are, which version, and that they are whole:
//   sealed := MAGIC " " VERSION LF { line LF } "end " HASH LF
//   HASH   := hash_hex of all bytes before the word "end"
#pragma once

#include <string>
#include <string_view>

#include "base/error.hpp"

namespace f8 {

struct SealedKind {
  std::string_view magic;   // "float8-table"
  int version = 1;          // that is written, and the only one that is read
  std::string_view name;    // "tuning table", for messages
  std::string_view remedy;  // for another version: "export it again with this one"
};

[[nodiscard]] std::string first_line(const SealedKind& kind);
// `body` begins with the first line.
[[nodiscard]] std::string seal(std::string body);
// The lines between the first one and the last. kUnsupported for another version, kCorrupt for what
// is no such text, is cut short or was changed.
[[nodiscard]] Result<std::string_view> unseal(const SealedKind& kind, std::string_view text);

}  // namespace f8
