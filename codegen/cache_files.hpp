// The files of the cubin cache by descriptor. A name is looked up once, in a directory that is open
// already, and the checks are about what was opened: swapping a directory or a file between a check
// and its use changes nothing. Symbolic links below the cache directory are never followed.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/descriptor.hpp"
#include "base/folder.hpp"

namespace f8::codegen {

// Opens a directory inside of `parent`. The error is kNotFound where there is none, kCorrupt where
// something else has its name, and kEnvironment where this process cannot open it now: another user
// may, or the same one later.
[[nodiscard]] Result<Descriptor> open_directory_at(int parent, const char* name);

// Who can change a file or directory, beside root: nothing that others can change is trusted. The
// text is the end of a sentence ("belongs to user 12"), and empty where nobody else can.
[[nodiscard]] std::string why_untrusted(const struct stat& info);

// Reads a regular file of at most `max_bytes`. The errors of opening are those of a directory; others
// say what is wrong with the file, which they call by its name.
[[nodiscard]] Result<std::string> read_file_at(int directory, const char* name, size_t max_bytes);

// Makes a file that does not exist yet, readable for everybody who can enter the directory, whatever
// the umask, and flushes it.
[[nodiscard]] Status write_file_at(int directory, const char* name, std::string_view bytes);

// Makes a private directory "tmp.<pid>.<random>" and returns its name.
[[nodiscard]] Result<std::string> make_temporary_at(int directory);

// The names in a directory, without "." and "..".
[[nodiscard]] std::vector<std::string> names_in(int directory);

}  // namespace f8::codegen
