// Manifests of the cubin cache: as they stand, and with a checksum that fits.
#include "base/hash.hpp"
#include "codegen/cubin_entry.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace f8::codegen {
namespace {

constexpr std::string_view kKey = "0123456789abcdef0123456789abcdef";
constexpr std::string_view kImage =
    "\x7f"
    "ELF image";

void check(std::string_view manifest) {
  const auto cubin = read_manifest(manifest, kKey, kImage);
  if (!cubin) {
    FUZZ_CHECK(cubin.error().code == ErrorCode::kCorrupt);
    fuzz::check_readable(cubin.error().message);
    return;
  }
  fuzz::count_accepted();
  FUZZ_CHECK(cubin->registers >= 0 && cubin->spill_bytes >= 0 && cubin->smem_bytes >= 0);
}

}  // namespace
}  // namespace f8::codegen

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view manifest = f8::fuzz::text_of(data, size);
  f8::codegen::check(manifest);
  const std::string body(manifest.substr(0, manifest.rfind("checksum ")));
  f8::codegen::check(body + "checksum " + f8::hash_hex(body) + "\n");
  return 0;
}
