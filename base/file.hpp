// Whole files in and out, with errors as values. These are the only reader and the only writer of
// the library and of its tools, so that what follows holds for every file that they touch.
//
// Reading is bounded. A file has at most the bytes that the caller allows, and it is a regular file:
// a directory, a device, a socket or a fifo is refused before a byte is read. A caller may welcome a
// pipe, which is then waited for no longer than kPipePatience; a warning says so after kSilence.
// Opening never blocks.
//
// Writing depends on what the path names:
//   nothing, a regular file   a new file next to the target takes its place when it is complete: a
//                             reader sees the old bytes or the new ones, and a full disk leaves the
//                             old ones. The new file keeps the target's mode, and where the system
//                             allows it its owner; without a target the umask decides. A file that
//                             the caller may not write to is not replaced.
//   a symbolic link           what it names is the target; it may not exist yet
//   a character device, fifo  it is opened and written into, never replaced; /dev/stdout and its like
//                             are the descriptor of this process
//   a directory, a block device, a socket: refused
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/descriptor.hpp"
#include "base/folder.hpp"

namespace f8 {

// What a caller without a reason for another limit allows.
inline constexpr size_t kMaxFileBytes = size_t{256} << 20;
// A pipe may be silent so long while somebody has it open for writing.
inline constexpr std::chrono::seconds kPipePatience{30};
// A reader that waits for a writer says so after so long.
inline constexpr std::chrono::seconds kSilence{2};

enum class Pipes { kRefused, kWelcome };
[[nodiscard]] Result<std::string> read_file(const fs::path& path, size_t max_bytes = kMaxFileBytes,
                                            Pipes pipes = Pipes::kRefused);
// The first `max_bytes` of a regular file of any size, or all of a shorter one.
struct FileFront {
  std::string bytes;
  uint64_t file_bytes = 0;
};
[[nodiscard]] Result<FileFront> read_front(const fs::path& path, size_t max_bytes);
// Reads an open descriptor of any kind to its end and waits as long as that takes. `name` is what
// messages call it.
[[nodiscard]] Result<std::string> read_descriptor(int fd, std::string_view name, size_t max_bytes);
// Refuses what is neither a regular file nor a welcome pipe.
[[nodiscard]] Status check_kind(mode_t mode, std::string_view name, Pipes pipes);

// Files that a command line names: "-" is standard input where a command reads and standard output
// where it writes; "./-" is a file of that name. Pipes are welcome.
[[nodiscard]] inline bool is_standard_stream(const fs::path& path) {
  return path == "-";
}
[[nodiscard]] Result<std::string> read_input(const fs::path& path,
                                             size_t max_bytes = kMaxFileBytes);
[[nodiscard]] std::string input_name(const fs::path& path);  // for messages
[[nodiscard]] fs::path output_path(const fs::path& path);    // for the writers below

// Fails where the writers below would fail before their first byte: a command asks before it computes
// what it is going to write.
[[nodiscard]] Status check_writable(const fs::path& path);

[[nodiscard]] Status write_file_atomic(const fs::path& path, std::string_view bytes);
// Files that belong together: all of them are complete before the first takes its place.
struct NamedBytes {
  fs::path path;
  std::string bytes;
};
[[nodiscard]] Status write_files_atomic(std::span<const NamedBytes> files);
// The same for a library that wants a path: `fill` writes into an empty file, which takes the
// target's place if `fill` succeeds. Where the target is no file that can be replaced, the empty one
// is a temporary file. `name` is for messages: the path that a full disk is about.
using FillFile = std::function<Status(const fs::path& empty, const fs::path& name)>;
[[nodiscard]] Status replace_file(const fs::path& target, const FillFile& fill);

// An output that grows while a command works. A device, a fifo or this process's own descriptor takes
// each piece as it comes; a file is replaced by a longer one with each, so it is whole at any moment,
// and what was there before stays until the first piece.
class GrowingFile {
 public:
  [[nodiscard]] static Result<GrowingFile> open(const fs::path& path);
  [[nodiscard]] Status append(std::string_view bytes);

 private:
  fs::path path_;
  Descriptor stream_;
  std::string bytes_;  // all there are, where there is no stream
};

// Writes in place and flushes; a crash may leave a part of the bytes.
[[nodiscard]] Status write_file_synced(const fs::path& path, std::string_view bytes);
// Removes what killed processes left in a folder: regular files of this user which nobody has
// written for a day and whose name `is_temporary`.
void remove_stale_files(const fs::path& folder,
                        const std::function<bool(std::string_view name)>& is_temporary);

}  // namespace f8
