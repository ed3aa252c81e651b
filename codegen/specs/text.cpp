#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<ScaleMode> parse_scale(std::string_view text) {
  for (const ScaleMode mode :
       {ScaleMode::kTensor, ScaleMode::kAxis, ScaleMode::kBlock1x128, ScaleMode::kBlock128x128}) {
    if (text == to_string(mode)) return mode;
  }
  return fail(ErrorCode::kInvalidArgument,
              "unknown scale {}: expected tensor, axis, block1x128 or block128x128", quote(text));
}

Status check_input(Dtype in, bool from_f32) {
  if (is_fp8(in)) {
    return fail(ErrorCode::kInvalidArgument, "type {}: expected bf16, f16 or f32", to_string(in));
  }
  if (from_f32 && in == Dtype::kF32) {
    return fail(ErrorCode::kInvalidArgument, "/from_f32 rounds fp32 elements to bf16 or f16");
  }
  return {};
}

const char* input_name(Dtype in, bool from_f32) {
  if (from_f32) return in == Dtype::kF16 ? "Input::kF32AsF16" : "Input::kF32AsBf16";
  return in == Dtype::kF32 ? "Input::kF32" : in == Dtype::kF16 ? "Input::kF16" : "Input::kBf16";
}

const char* scale_name(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kTensor:
      return "Scale::kTensor";
    case ScaleMode::kAxis:
      return "Scale::kAxis";
    case ScaleMode::kBlock1x128:
      return "Scale::kBlock1x128";
    case ScaleMode::kBlock128x128:
      return "Scale::kBlock128x128";
  }
  return "";
}

std::string constant(std::string_view type, std::string_view name, std::string_view value) {
  return f8::format("  static constexpr {} {} = {};\n", type, name, value);
}
std::string constant(std::string_view name, int value) {
  return constant("int", name, fmt::to_string(value));
}
std::string constant(std::string_view name, bool value) {
  return constant("bool", name, value ? "true" : "false");
}

std::string check(std::string_view device, size_t value, std::string_view host) {
  return f8::format("static_assert({} == {}, \"{} on the host\");\n", device, value, host);
}
std::string check_threads(std::string_view device, const LaunchTraits& launch) {
  return check(device, static_cast<size_t>(launch.threads), "threads_per_block()");
}

Stub function_stub(std::string_view file, std::string_view name, std::string_view config,
                   std::string_view args, size_t bytes, const LaunchTraits& launch,
                   int blocks_per_sm) {
  Stub stub{file, f8::format("float8_{}", name), std::string(config)};
  stub.text += check(f8::format("sizeof({})", args), bytes, "kernel_args.cuh");
  stub.text += check_threads("kTileThreads", launch);
  stub.text += f8::format(
      "extern \"C\" __global__ void __launch_bounds__(kTileThreads{2})\n"
      "float8_{0}(const __grid_constant__ {1} args) {{\n"
      "  {0}<Config>(args);\n"
      "}}\n",
      name, args, blocks_per_sm == 0 ? "" : f8::format(", {}", blocks_per_sm));
  return stub;
}

}  // namespace f8::codegen
