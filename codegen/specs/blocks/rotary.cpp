#include "codegen/specs/blocks/rotary.hpp"

#include "codegen/kernels/attention/rotary_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {
namespace {

constexpr std::string_view kInverse = "/inverse";

}  // namespace

Result<RotarySpec> RotarySpec::parse(std::string_view, std::string_view rest) {
  RotarySpec spec;
  spec.inverse = rest.ends_with(kInverse);
  if (spec.inverse) rest.remove_suffix(kInverse.size());
  const size_t first = rest.find('/');
  const size_t second = rest.find('/', first == std::string_view::npos ? first : first + 1);
  if (second == std::string_view::npos) {
    return fail(ErrorCode::kInvalidArgument,
                "\"rotary\" needs three types, as in rotary/bf16/f32/bf16");
  }
  spec.in = F8_TRY(parse_dtype(rest.substr(0, first)));
  spec.cos = F8_TRY(parse_dtype(rest.substr(first + 1, second - first - 1)));
  spec.out = F8_TRY(parse_dtype(rest.substr(second + 1)));
  return spec;
}

std::string RotarySpec::key() const {
  return f8::format("rotary/{}/{}/{}{}", to_string(in), to_string(cos), to_string(out),
                    inverse ? kInverse : "");
}

Status RotarySpec::validate() const {
  F8_TRY(check_input(in));
  F8_TRY(check_input(cos));
  return check_input(out);
}

Stub RotarySpec::stub() const {
  return {"rotary.cuh", "float8_rotary",
          check_args<kernels::RotaryArgs>("RotaryArgs") +
              check_threads("kRotaryThreads", launch()) +
              f8::format("extern \"C\" __global__ void __launch_bounds__(kRotaryThreads)\n"
                         "float8_rotary(const __grid_constant__ RotaryArgs args) {{\n"
                         "  rotary<{}, {}, {}, {}>(args);\n"
                         "}}\n",
                         input_name(in), input_name(cos), input_name(out), inverse)};
}

LaunchTraits RotarySpec::launch() const {
  return {.threads = kernels::kRotaryThreads};
}

ParameterBytes RotarySpec::parameters() const {
  return {.first = sizeof(kernels::RotaryArgs)};
}

}  // namespace f8::codegen
