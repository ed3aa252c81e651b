// Kernel keys and GEMM configurations.
#include "codegen/kernel_spec.hpp"

#include "tests/fuzz/fuzz.hpp"

namespace f8::codegen {
namespace {

void check_spec(std::string_view text) {
  const auto spec = parse_kernel_spec(text);
  if (!spec) {
    FUZZ_CHECK(spec.error().code == ErrorCode::kInvalidArgument);
    fuzz::check_readable(spec.error().message);
    return;
  }
  fuzz::count_accepted();
  FUZZ_CHECK(validate(*spec).has_value());
  const auto again = parse_kernel_spec(key(*spec));
  FUZZ_CHECK(again && *again == *spec);
  FUZZ_CHECK(key(*spec) == text);
}

void check_config(std::string_view text) {
  const auto config = parse_gemm_config(text);
  if (!config) {
    FUZZ_CHECK(config.error().code == ErrorCode::kInvalidArgument);
    fuzz::check_readable(config.error().message);
    return;
  }
  fuzz::count_accepted();
  const auto again = parse_gemm_config(key(*config));
  FUZZ_CHECK(again && *again == *config);
}

}  // namespace
}  // namespace f8::codegen

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  f8::codegen::check_spec(f8::fuzz::text_of(data, size));
  f8::codegen::check_config(f8::fuzz::text_of(data, size));
  return 0;
}
