#include "codegen/specs/swiglu_cast.hpp"

#include "codegen/kernels/kernel_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<SwigluCastSpec> SwigluCastSpec::parse(std::string_view, std::string_view rest) {
  return SwigluCastSpec{F8_TRY(CastSpec::parse("cast", rest))};
}

std::string SwigluCastSpec::key() const {
  constexpr std::string_view kCast = "cast/";
  return "swiglu_cast/" + cast.key().substr(kCast.size());
}

Status SwigluCastSpec::validate() const {
  F8_TRY(cast.validate());
  if (amax_before(cast)) {
    return fail(ErrorCode::kInvalidArgument,
                "silu(gate) up is computed once: its scales are delayed, or those of blocks");
  }
  if (cast.one_launch || cast.list || cast.sums || cast.noop_flag || cast.from_f32) {
    return fail(ErrorCode::kInvalidArgument,
                "a cast of silu(gate) up has the options /pow2, /hold and /count alone");
  }
  return {};
}

Stub SwigluCastSpec::stub() const {
  return {"swiglu_cast.cuh", "float8_swiglu_cast",
          cast_config(cast) + check_args<kernels::SwigluCastArgs>("SwigluCastArgs") +
              check_threads("kTileThreads", launch()) +
              "extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
              "float8_swiglu_cast(const __grid_constant__ SwigluCastArgs args) {\n"
              "  swiglu_cast<Config>(args);\n"
              "}\n"};
}

LaunchTraits SwigluCastSpec::launch() const {
  return cast.launch();
}

ParameterBytes SwigluCastSpec::parameters() const {
  return {.first = sizeof(kernels::SwigluCastArgs)};
}

}  // namespace f8::codegen
