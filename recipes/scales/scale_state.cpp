// Reads and writes scale states. The sizes that a file claims are checked against its own size
// before anything is allocated for them.
#include "recipes/scales/scale_state.hpp"

#include <array>
#include <bit>
#include <cstring>

#include "base/hash.hpp"
#include "base/text.hpp"

namespace f8 {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kName = "float8-scales ";
constexpr std::string_view kFirstLine = "float8-scales 1\n";
constexpr size_t kWord = sizeof(uint32_t);
constexpr size_t kHeader = kFirstLine.size() + 2 * kWord;
constexpr size_t kHash = 32;
constexpr uint32_t kMaxLength = 1024;  // of DelayedOptions
constexpr uint32_t kE5m2Bit = 1;
constexpr uint32_t kPow2Bit = 2;

void append(std::string& out, std::span<const uint32_t> words) {
  out.append(reinterpret_cast<const char*>(words.data()), words.size() * kWord);
}

std::vector<uint32_t> take(std::string_view& bytes, size_t count) {
  std::vector<uint32_t> words(count);
  if (count > 0) std::memcpy(words.data(), bytes.data(), count * kWord);
  bytes.remove_prefix(count * kWord);
  return words;
}

uint32_t format_bits(const DelayedSlot& slot) {
  return (slot.dtype == Dtype::kE5m2 ? kE5m2Bit : 0) | (slot.pow2 ? kPow2Bit : 0);
}

}  // namespace

size_t ScaleState::serialized_bytes(size_t count, uint32_t length) {
  return kHeader + kWord * count * (5 + size_t{length}) + kHash;
}

std::string ScaleState::serialize() const {
  std::string out(kFirstLine);
  out.reserve(serialized_bytes(slots.size(), length));
  const uint32_t sizes[] = {static_cast<uint32_t>(slots.size()), length};
  append(out, sizes);
  for (const DelayedSlot& slot : slots) append(out, std::array{format_bits(slot)});
  for (const auto* words : {&amax, &scale, &inverse, &history, &non_finite}) append(out, *words);
  return out + hash_hex(std::string_view(out));
}

Result<ScaleState> ScaleState::parse(std::string_view bytes) {
  if (!bytes.starts_with(kName)) {
    return fail(ErrorCode::kCorrupt, "not a scale state: it begins with {}, not with {}",
                quote(bytes.substr(0, kName.size())), quote(kName));
  }
  if (!bytes.starts_with(kFirstLine)) {
    const std::string_view version = bytes.substr(kName.size(), 8);
    return fail(
        ErrorCode::kUnsupported,
        "a scale state of version {}; this float8 reads version 1, use the one that wrote it",
        quote(version.substr(0, version.find('\n'))));
  }
  const auto wrong_size = [&](size_t expected) {
    return fail(ErrorCode::kCorrupt, "a scale state of {} bytes where its header asks for {}: {}",
                bytes.size(), expected,
                bytes.size() < expected ? "it was cut short" : "something follows it");
  };
  if (bytes.size() < kHeader) return wrong_size(kHeader + kHash);
  std::string_view rest = bytes.substr(kFirstLine.size());
  const std::vector<uint32_t> sizes = take(rest, 2);
  if (sizes[1] > kMaxLength) {
    return fail(ErrorCode::kCorrupt, "a scale state with histories of {}; at most {}", sizes[1],
                kMaxLength);
  }
  const size_t expected = serialized_bytes(sizes[0], sizes[1]);
  if (bytes.size() != expected) return wrong_size(expected);
  const std::string_view told = bytes.substr(expected - kHash);
  if (hash_hex(bytes.substr(0, expected - kHash)) != told) {
    return fail(ErrorCode::kCorrupt,
                "a scale state whose bytes are not those that were saved: its hash is {}",
                quote(told));
  }
  ScaleState state;
  state.length = sizes[1];
  for (const uint32_t format : take(rest, sizes[0])) {
    if (format > (kE5m2Bit | kPow2Bit)) {
      return fail(ErrorCode::kCorrupt, "a scale state with an operand of format {}; 0 to 3",
                  format);
    }
    state.slots.push_back(
        {(format & kE5m2Bit) != 0 ? Dtype::kE5m2 : Dtype::kE4m3, (format & kPow2Bit) != 0});
  }
  state.amax = take(rest, sizes[0]);
  state.scale = take(rest, sizes[0]);
  state.inverse = take(rest, sizes[0]);
  state.history = take(rest, size_t{sizes[0]} * sizes[1]);
  state.non_finite = take(rest, sizes[0]);
  return state;
}

}  // namespace f8
