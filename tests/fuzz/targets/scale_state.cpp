// Scale states: bytes as they stand, and under a hash that fits them.
#include "recipes/scales/scale_state.hpp"

#include <algorithm>

#include "base/hash.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace f8 {
namespace {

void check(std::string_view bytes) {
  const auto state = ScaleState::parse(bytes);
  if (!state) {
    FUZZ_CHECK(state.error().code == ErrorCode::kCorrupt ||
               state.error().code == ErrorCode::kUnsupported);
    fuzz::check_readable(state.error().message);
    return;
  }
  fuzz::count_accepted();
  FUZZ_CHECK(state->serialize() == bytes);
}

}  // namespace
}  // namespace f8

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes = f8::fuzz::text_of(data, size);
  const std::string_view body = bytes.substr(0, bytes.size() - std::min<size_t>(bytes.size(), 32));
  f8::check(bytes);
  f8::check(std::string(body) + f8::hash_hex(body));
  return 0;
}
