#include "codegen/specs/swiglu_cast.hpp"

#include "codegen/kernels/kernel_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<SwigluCastSpec> SwigluCastSpec::parse(std::string_view kind, std::string_view rest) {
  return SwigluCastSpec{F8_TRY(CastSpec::parse("cast", rest)), kind == kKinds[1]};
}

std::string SwigluCastSpec::key() const {
  constexpr std::string_view kCast = "cast/";
  return f8::format("{}/{}", kKinds[backward ? 1 : 0], cast.key().substr(kCast.size()));
}

Status SwigluCastSpec::validate() const {
  F8_TRY(cast.validate());
  if (cast.one_launch || cast.list || cast.sums || cast.noop_flag || cast.from_f32 || cast.shard ||
      cast.group) {
    return fail(ErrorCode::kInvalidArgument,
                "a cast of silu(gate) up has the options /pow2, /hold and /count alone");
  }
  return {};
}

Stub SwigluCastSpec::stub() const {
  return function_stub("swiglu_cast.cuh", kKinds[backward ? 1 : 0], cast_config(cast),
                       backward ? "SwigluBackwardArgs" : "SwigluCastArgs", parameters().first,
                       launch());
}

LaunchTraits SwigluCastSpec::launch() const {
  return cast.launch();
}

ParameterBytes SwigluCastSpec::parameters() const {
  return {.first =
              backward ? sizeof(kernels::SwigluBackwardArgs) : sizeof(kernels::SwigluCastArgs)};
}

}  // namespace f8::codegen
