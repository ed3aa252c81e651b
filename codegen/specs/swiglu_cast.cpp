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
  if (const auto amax = amax_before(cast); amax && (amax->row || amax->col || amax->block)) {
    return fail(ErrorCode::kInvalidArgument,
                "silu(gate) up is not in memory, where maxima of rows and columns are found: its "
                "scales are the tensor's, or those of blocks");
  }
  if (cast.one_launch || cast.list || cast.sums || cast.noop_flag || cast.from_f32) {
    return fail(ErrorCode::kInvalidArgument,
                "a cast of silu(gate) up has the options /pow2, /hold and /count alone");
  }
  return {};
}

Stub SwigluCastSpec::stub() const {
  const std::string_view name = kKinds[backward ? 1 : 0];
  const std::string args = backward ? "SwigluBackwardArgs" : "SwigluCastArgs";
  Stub stub{"swiglu_cast.cuh", f8::format("float8_{}", name), cast_config(cast)};
  stub.text += backward ? check_args<kernels::SwigluBackwardArgs>(args)
                        : check_args<kernels::SwigluCastArgs>(args);
  stub.text += check_threads("kTileThreads", launch());
  stub.text += f8::format(
      "extern \"C\" __global__ void __launch_bounds__(kTileThreads)\n"
      "float8_{0}(const __grid_constant__ {1} args) {{\n"
      "  {0}<Config>(args);\n"
      "}}\n",
      name, args);
  return stub;
}

LaunchTraits SwigluCastSpec::launch() const {
  return cast.launch();
}

ParameterBytes SwigluCastSpec::parameters() const {
  return {.first =
              backward ? sizeof(kernels::SwigluBackwardArgs) : sizeof(kernels::SwigluCastArgs)};
}

}  // namespace f8::codegen
