#include "codegen/specs/swiglu_amax.hpp"

#include "codegen/kernels/kernel_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<SwigluAmaxSpec> SwigluAmaxSpec::parse(std::string_view kind, std::string_view rest) {
  return SwigluAmaxSpec{F8_TRY(AmaxSpec::parse("amax", rest)), kind == kKinds[1]};
}

std::string SwigluAmaxSpec::key() const {
  constexpr std::string_view kAmax = "amax/";
  return f8::format("{}/{}", kKinds[backward ? 1 : 0], amax.key().substr(kAmax.size()));
}

Status SwigluAmaxSpec::validate() const {
  F8_TRY(amax.validate());
  if (amax.block || amax.list || amax.noop_flag || amax.from_f32 || amax.group) {
    return fail(ErrorCode::kInvalidArgument,
                "maxima of silu(gate) up are over the tensor, rows and columns, without options");
  }
  return {};
}

Stub SwigluAmaxSpec::stub() const {
  // A tensor's launch has six blocks an SM (amax_partials), all of which are to be resident.
  const bool bounded = !amax.row && !amax.col && amax.in != Dtype::kF32;
  return function_stub("swiglu_amax.cuh", kKinds[backward ? 1 : 0], amax_config(amax),
                       backward ? "SwigluBackwardAmaxArgs" : "SwigluAmaxArgs", parameters().first,
                       launch(), bounded ? 6 : 0);
}

LaunchTraits SwigluAmaxSpec::launch() const {
  return amax.launch();
}

ParameterBytes SwigluAmaxSpec::parameters() const {
  return {.first =
              backward ? sizeof(kernels::SwigluBackwardAmaxArgs) : sizeof(kernels::SwigluAmaxArgs)};
}

}  // namespace f8::codegen
