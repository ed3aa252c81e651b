#include "codegen/cubin_entry.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>

#include "base/hash.hpp"

namespace f8::codegen {
namespace {

constexpr const char* kImageName = "kernel.cubin";
constexpr const char* kManifestName = "manifest";

std::string_view as_text(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Takes a manifest apart from the front. The first field that is not as expected is remembered,
// and every later one comes out empty.
class FieldReader {
 public:
  explicit FieldReader(std::string_view text) : rest_(text) {}

  std::string_view line(std::string_view name) {
    const size_t end = rest_.find('\n');
    const bool fits = bad_field_.empty() && end != std::string_view::npos && end > name.size() &&
                      rest_.starts_with(name) && rest_[name.size()] == ' ';
    if (!fits) return miss(name);
    const std::string_view value = rest_.substr(name.size() + 1, end - name.size() - 1);
    rest_.remove_prefix(end + 1);
    return value;
  }

  template <class Number>
  Number number(std::string_view name) {
    const std::string_view text = line(name);
    Number value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 0) miss(name);
    return value;
  }

  std::string_view block(std::string_view name, size_t bytes) {
    if (!bad_field_.empty() || rest_.size() <= bytes || rest_[bytes] != '\n') return miss(name);
    const std::string_view value = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes + 1);
    return value;
  }

  [[nodiscard]] std::string_view bad_field() const { return bad_field_; }
  [[nodiscard]] bool at_end() const { return rest_.empty(); }

 private:
  std::string_view miss(std::string_view name) {
    if (bad_field_.empty()) bad_field_ = name;
    return {};
  }

  std::string_view rest_;
  std::string_view bad_field_;
};

// The manifest without its last line, which must be the checksum of the rest.
Result<std::string_view> checked_body(std::string_view manifest) {
  constexpr std::string_view kField = "checksum ";
  constexpr size_t kLine = kField.size() + 32 + 1;
  if (manifest.size() < kLine) {
    return fail(ErrorCode::kCorrupt, "its manifest has {} bytes", manifest.size());
  }
  const std::string_view body = manifest.substr(0, manifest.size() - kLine);
  if (manifest.substr(body.size()) != f8::format("{}{}\n", kField, hash_hex(body))) {
    return fail(ErrorCode::kCorrupt, "its manifest is cut off or was changed");
  }
  return body;
}

Status check_size(const char* name, size_t bytes, size_t most) {
  if (bytes <= most) return {};
  return fail(ErrorCode::kUnsupported, "{} would have {} bytes, {} at most are accepted", name,
              bytes, most);
}

Status write_entry(int directory, const std::string& key, const Cubin& cubin) {
  const std::string manifest = write_manifest(key, cubin);
  F8_TRY(check_size(kManifestName, manifest.size(), kMaxManifestBytes));
  F8_TRY(check_size(kImageName, cubin.image.size(), kMaxImageBytes));
  F8_TRY(write_file_at(directory, kImageName, as_text(cubin.image)));
  F8_TRY(write_file_at(directory, kManifestName, manifest));
  // A cache that its owner opens to readers has readable entries, whatever the umask was.
  if (::fchmod(directory, 0755) != 0 || ::fsync(directory) != 0) {
    return fail(ErrorCode::kIo, "cannot flush its directory to disk: {}", errno_text());
  }
  return {};
}

// Writes an entry into a new temporary directory and gives it its name.
Status write_and_rename(const CacheDirectory& cache, const std::string& temporary,
                        const std::string& key, const Cubin& cubin) {
  const Descriptor directory = F8_TRY(open_directory_at(cache.fd.get(), temporary.c_str()));
  F8_TRY(write_entry(directory.get(), key, cubin));
  if (::renameat(cache.fd.get(), temporary.c_str(), cache.fd.get(), key.c_str()) != 0) {
    return fail(ErrorCode::kIo, "cannot rename {} to {}: {}", temporary, key, errno_text());
  }
  return {};
}

}  // namespace

std::string write_manifest(std::string_view key, const Cubin& cubin) {
  std::string text = f8::format(
      "float8 cubin {}\n"
      "key {}\nkernel {}\nentry {}\n"
      "cubin_bytes {}\ncubin_checksum {}\n"
      "registers {}\nspill_bytes {}\nsmem_bytes {}\n"
      "compile_ms {:.3f}\nlog_bytes {}\n{}\n",
      kEntryFormat, key, cubin.key, cubin.entry, cubin.image.size(), hash_hex(as_text(cubin.image)),
      cubin.registers, cubin.spill_bytes, cubin.smem_bytes, cubin.compile_ms, cubin.log.size(),
      cubin.log);
  text += f8::format("checksum {}\n", hash_hex(text));
  return text;
}

Result<Cubin> read_manifest(std::string_view manifest, std::string_view key,
                            std::string_view image) {
  FieldReader fields(F8_TRY(checked_body(manifest)));
  Cubin cubin;
  const bool known = fields.number<int>("float8 cubin") == kEntryFormat;
  const std::string_view stored_key = fields.line("key");
  cubin.key = fields.line("kernel");
  cubin.entry = fields.line("entry");
  const auto image_bytes = fields.number<size_t>("cubin_bytes");
  const std::string_view image_checksum = fields.line("cubin_checksum");
  cubin.registers = fields.number<int>("registers");
  cubin.spill_bytes = fields.number<int>("spill_bytes");
  cubin.smem_bytes = fields.number<int>("smem_bytes");
  cubin.compile_ms = fields.number<double>("compile_ms");
  cubin.log = fields.block("log", fields.number<size_t>("log_bytes"));
  if (!fields.bad_field().empty()) {
    return fail(ErrorCode::kCorrupt, "its manifest has no sound field {}", fields.bad_field());
  }
  if (!known || !fields.at_end() || stored_key != key) {
    return fail(ErrorCode::kCorrupt, "its manifest is that of another entry");
  }
  if (image_bytes != image.size()) {
    return fail(ErrorCode::kCorrupt, "{} has {} bytes, its manifest says {}", kImageName,
                image.size(), image_bytes);
  }
  if (image_checksum != hash_hex(image)) {
    return fail(ErrorCode::kCorrupt, "{} does not have the checksum in its manifest", kImageName);
  }
  return cubin;
}

Result<Cubin> load_entry(const CacheDirectory& cache, const std::string& key) {
  const Descriptor directory = F8_TRY(open_directory_at(cache.fd.get(), key.c_str()));
  struct stat info {};
  if (::fstat(directory.get(), &info) != 0) {
    return fail(ErrorCode::kCorrupt, "cannot look at its directory: {}", errno_text());
  }
  if (const std::string why = why_untrusted(info); !why.empty()) {
    return fail(ErrorCode::kCorrupt, "its directory {}", why);
  }
  const auto damaged = [](Error e) {
    if (e.code == ErrorCode::kNotFound) e.code = ErrorCode::kCorrupt;
    return std::unexpected(std::move(e));
  };
  auto manifest = read_file_at(directory.get(), kManifestName, kMaxManifestBytes);
  if (!manifest) return damaged(std::move(manifest).error());
  auto image = read_file_at(directory.get(), kImageName, kMaxImageBytes);
  if (!image) return damaged(std::move(image).error());
  Cubin cubin = F8_TRY(read_manifest(*manifest, key, *image));
  const auto* bytes = reinterpret_cast<const std::byte*>(image->data());
  cubin.image.assign(bytes, bytes + image->size());
  cubin.from_cache = true;
  return cubin;
}

Result<std::optional<Cubin>> store_entry(const CacheDirectory& cache, const std::string& key,
                                         const Cubin& cubin) {
  const auto in_cache = [&](Error error) {
    error.message = f8::format("cache directory {}: {}", cache.path.string(), error.message);
    return std::unexpected(std::move(error));
  };
  const Result<std::string> temporary = make_temporary_at(cache.fd.get());
  if (!temporary) return in_cache(temporary.error());
  if (Status written = write_and_rename(cache, *temporary, key, cubin); !written) {
    remove_tree_at(cache.fd.get(), temporary->c_str());
    if (auto winner = load_entry(cache, key)) return std::move(*winner);
    return in_cache(std::move(written).error());
  }
  if (::fsync(cache.fd.get()) != 0) {
    return fail(ErrorCode::kIo, "cannot flush the cache directory {} to disk: {}",
                cache.path.string(), errno_text());
  }
  return std::nullopt;
}

Status remove_entry(const CacheDirectory& cache, const std::string& key) {
  const std::string temporary = F8_TRY(make_temporary_at(cache.fd.get()));
  Status moved;
  const std::string to = temporary + "/" + key;
  if (::renameat(cache.fd.get(), key.c_str(), cache.fd.get(), to.c_str()) != 0 && errno != ENOENT) {
    moved = fail(ErrorCode::kIo, "cannot remove {}: {}", (cache.path / key).string(), errno_text());
  }
  remove_tree_at(cache.fd.get(), temporary.c_str());
  return moved;
}

}  // namespace f8::codegen
