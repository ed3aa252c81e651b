// Reading checks the kind, the version, whether the text is whole, and the hash, in this order.
#include "recipes/sealed_text.hpp"

#include <cmath>

#include "base/hash.hpp"
#include "base/number.hpp"
#include "base/text.hpp"

namespace f8 {
namespace {

Result<int> read_version(const SealedKind& kind, std::string_view text) {
  const int version = number_of<int>(text).value_or(0);
  const bool is_number = text == f8::format("{}", version);
  if (is_number && version >= kind.oldest && version <= kind.version) return version;
  const bool newer = is_number && version > kind.version;
  return fail(ErrorCode::kUnsupported, "{} has version {}, this float8 reads {}; {}{}", kind.name,
              quote(text), kind.version, newer ? "use the newer float8 that wrote it, or " : "",
              kind.remedy);
}

}  // namespace

std::string first_line(const SealedKind& kind) {
  return f8::format("{} {}\n", kind.magic, kind.version);
}

std::string seal(std::string body) {
  const std::string hash = hash_hex(std::string_view(body));
  return std::move(body) + f8::format("end {}\n", hash);
}

Result<Unsealed> unseal(const SealedKind& kind, std::string_view text) {
  const std::string_view name = kind.name;
  if (!text.starts_with(f8::format("{} ", kind.magic))) {
    return fail(ErrorCode::kCorrupt, "not a float8 {}: it does not start with '{}'; {} writes one",
                name, kind.magic, kind.made_by);
  }
  std::string_view rest = text.substr(kind.magic.size() + 1);
  if (rest.find('\n') == std::string_view::npos) {
    return fail(ErrorCode::kCorrupt, "{} is truncated: its first line has no end", name);
  }
  const int version = F8_TRY(read_version(kind, take_until(rest, '\n')));
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
  return Unsealed{version, rest.substr(0, rest.size() - (text.size() - hashed.size()))};
}

Result<double> parse_positive(const char* field, std::string_view text) {
  const auto value = number_of<double>(text);
  if (value && std::isfinite(*value) && *value > 0) return *value;
  return fail(ErrorCode::kCorrupt, "{} {} is not a positive number", field, quote(text));
}

}  // namespace f8
