// Reading checks the kind, the version, whether the text is whole, and the hash, in this order.
#include "recipes/sealed_text.hpp"

#include "base/hash.hpp"
#include "base/text.hpp"

namespace f8 {

std::string first_line(const SealedKind& kind) {
  return f8::format("{} {}\n", kind.magic, kind.version);
}

std::string seal(std::string body) {
  const std::string hash = hash_hex(std::string_view(body));
  return std::move(body) + f8::format("end {}\n", hash);
}

Result<std::string_view> unseal(const SealedKind& kind, std::string_view text) {
  const std::string_view name = kind.name;
  if (!text.starts_with(f8::format("{} ", kind.magic))) {
    return fail(ErrorCode::kCorrupt, "not a float8 {}: it does not start with '{}'; {} writes one",
                name, kind.magic, kind.made_by);
  }
  std::string_view rest = text.substr(kind.magic.size() + 1);
  if (rest.find('\n') == std::string_view::npos) {
    return fail(ErrorCode::kCorrupt, "{} is truncated: its first line has no end", name);
  }
  const std::string_view version = take_until(rest, '\n');
  if (version != f8::format("{}", kind.version)) {
    return fail(ErrorCode::kUnsupported, "{} has version {}, this float8 reads {}; {}", name,
                quote(version), kind.version, kind.remedy);
  }
  const size_t end = text.rfind("\nend ");
  if (end == std::string_view::npos || text.back() != '\n') {
    return fail(ErrorCode::kCorrupt,
                "{} is truncated: its last line is not 'end HASH'; copy it again", name);
  }
  const std::string_view hashed = text.substr(0, end + 1);
  std::string_view tail = text.substr(end + 5);
  const std::string_view hash = take_until(tail, '\n');
  if (!tail.empty()) {
    return fail(ErrorCode::kCorrupt, "{} goes on after its 'end' line; copy it again", name);
  }
  if (const std::string actual = hash_hex(hashed); hash != actual) {
    return fail(ErrorCode::kCorrupt,
                "{} was changed or damaged: its hash is {}, its end line says {}", name, actual,
                quote(hash));
  }
  return rest.substr(0, rest.size() - (text.size() - hashed.size()));
}

}  // namespace f8
