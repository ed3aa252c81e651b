// One entry of the cubin cache on disk; cubin_cache.hpp has the grammar. An entry is never changed
// in place: it appears whole, by a rename, and disappears whole.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "codegen/cache_directory.hpp"
#include "codegen/nvrtc.hpp"

namespace f8::codegen {

// Bumped when the layout of an entry changes; part of the key, so older entries are never read.
inline constexpr int kEntryFormat = 1;
// The largest files that are read or stored: some hundred times what a kernel has.
inline constexpr size_t kMaxImageBytes = size_t{64} << 20;
inline constexpr size_t kMaxManifestBytes = size_t{4} << 20;

[[nodiscard]] std::string write_manifest(std::string_view key, const Cubin& cubin);
// All of a Cubin but its image, which must match `image`.
[[nodiscard]] Result<Cubin> read_manifest(std::string_view manifest, std::string_view key,
                                          std::string_view image);

// The error is kNotFound where there is no entry, and kEnvironment where this process cannot open it;
// any other error says what is wrong with it.
[[nodiscard]] Result<Cubin> load_entry(const CacheDirectory& cache, const std::string& key);
// If another process was faster, its entry is kept and returned.
[[nodiscard]] Result<std::optional<Cubin>> store_entry(const CacheDirectory& cache,
                                                       const std::string& key, const Cubin& cubin);
[[nodiscard]] Status remove_entry(const CacheDirectory& cache, const std::string& key);

}  // namespace f8::codegen
