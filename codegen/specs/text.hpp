// The words that the kinds' keys and stubs are made of.
#pragma once

#include "base/text.hpp"
#include "codegen/specs/kind.hpp"

namespace f8::codegen {

[[nodiscard]] Result<ScaleMode> parse_scale(std::string_view text);
// Refuses fp8, and with from_f32 fp32, as the type of elements that are read.
[[nodiscard]] Status check_input(Dtype in, bool from_f32 = false);

// Names of the device templates.
[[nodiscard]] const char* input_name(Dtype in, bool from_f32 = false);
[[nodiscard]] const char* scale_name(ScaleMode mode);

// Members of a stub's Config.
[[nodiscard]] std::string constant(std::string_view type, std::string_view name,
                                   std::string_view value);
[[nodiscard]] std::string constant(std::string_view name, int value);
[[nodiscard]] std::string constant(std::string_view name, bool value);

// Asserts a value that the host restates: a stub whose template disagrees does not compile. `host`
// names the place that restates it: of LaunchTraits, threads_per_block() and dynamic_smem_bytes(),
// which are words of every source that caches have the hash of.
[[nodiscard]] std::string check(std::string_view device, size_t value, std::string_view host);
template <class Args>
[[nodiscard]] std::string check_args(std::string_view name) {
  return check(f8::format("sizeof({})", name), sizeof(Args), "kernel_args.cuh");
}
[[nodiscard]] std::string check_threads(std::string_view device, const LaunchTraits& launch);
// The stub of a kernel float8_`name` that calls the template's function `name` with `args`, which have
// `bytes` bytes. `blocks_per_sm`: its registers let as many blocks fit an SM; 0: they are not bounded.
[[nodiscard]] Stub function_stub(std::string_view file, std::string_view name,
                                 std::string_view config, std::string_view args, size_t bytes,
                                 const LaunchTraits& launch, int blocks_per_sm = 0);

}  // namespace f8::codegen
