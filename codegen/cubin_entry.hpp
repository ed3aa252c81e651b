// One entry of the cubin cache on disk; cubin_cache.hpp has the grammar. An entry is never changed
// in place: it appears whole, by a rename, and disappears whole.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/file.hpp"
#include "codegen/nvrtc.hpp"

namespace f8::codegen {

// Bumped when the layout of an entry changes; part of the key, so older entries are never read.
inline constexpr int kEntryFormat = 1;

[[nodiscard]] std::string write_manifest(std::string_view key, const Cubin& cubin);
// All of a Cubin but its image, which must match `image`.
[[nodiscard]] Result<Cubin> read_manifest(std::string_view manifest, std::string_view key,
                                          std::string_view image);

// The error is kNotFound where there is no entry; any other error says what is wrong with it.
[[nodiscard]] Result<Cubin> load_entry(const fs::path& cache, const std::string& key);
// If another process was faster, its entry is kept and returned.
[[nodiscard]] Result<std::optional<Cubin>> store_entry(const fs::path& cache,
                                                       const std::string& key, const Cubin& cubin);
[[nodiscard]] Status remove_entry(const fs::path& cache, const std::string& key);

[[nodiscard]] std::string temporary_prefix();  // "tmp.<pid>."

}  // namespace f8::codegen
