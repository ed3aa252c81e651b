// Helpers for text that comes from outside: splitting it, and showing it so that a message that
// contains it stays one readable line and no byte of it commands a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace f8 {

// Returns the text in single quotes. A byte that is not printable ASCII becomes \xNN, and "..." stands
// for all beyond `longest` bytes.
[[nodiscard]] std::string quote(std::string_view text, size_t longest = 80);

// Returns the text with each control character (C0, DEL, and C1, which some terminals obey too), each
// character that is invisible or turns the order of others around (U+202E and its like), and each byte
// that is not UTF-8 as \xNN. Other text stays as it is; all of it is kept.
[[nodiscard]] std::string printable(std::string_view text);
// Returns what a message has of the text: printable, and with the first 80 bytes and "..." of words that
// are longer than any path. A message is no longer than kLongestMessage.
inline constexpr size_t kLongestMessage = 1 << 14;
[[nodiscard]] std::string message_text(std::string_view text);
// The most bytes of a name, of a layer or a tensor, that is read from a file.
inline constexpr size_t kLongestName = 4096;
// True if printable() would change the text.
[[nodiscard]] bool has_control(std::string_view text);

// Removes the text up to and including `separator` (all of it where there is none) from the front of
// `rest` and returns it without the separator.
std::string_view take_until(std::string_view& rest, char separator);
// Returns what lies between the separators: one item more than there are of these, and any may be empty.
[[nodiscard]] std::vector<std::string> split(std::string_view text, char separator);
// Removes a word from the front, or from the end; false, and nothing is removed, where it is not there.
[[nodiscard]] bool take(std::string_view& text, std::string_view word);
[[nodiscard]] bool take_off_end(std::string_view& text, std::string_view word);

}  // namespace f8
