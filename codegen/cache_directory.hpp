// The cache directory: who may write it, and what a crash left in it.
#pragma once

#include <string>

#include "base/file.hpp"
#include "codegen/cache_files.hpp"

namespace f8::codegen {

// A directory that is open for as long as the cache is used, and that nobody else could write when
// it was opened.
struct CacheDirectory {
  Descriptor fd;
  fs::path path;  // absolute; for messages, and to make the directory again once it was deleted
};

// Makes what is missing of the path, with mode 0700, and opens it. The error is the one thing to do.
[[nodiscard]] Result<CacheDirectory> open_cache_directory(const fs::path& path);

// Removes the temporary directories of dead processes that are older than an hour.
void remove_stale_temporaries(const CacheDirectory& cache);

}  // namespace f8::codegen
