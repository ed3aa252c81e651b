#include "codegen/specs/blocks/adamw.hpp"

#include "codegen/kernels/optimizer/adamw_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {

Result<AdamwSpec> AdamwSpec::parse(std::string_view, std::string_view rest) {
  return AdamwSpec{F8_TRY(AmaxSpec::parse("amax", rest))};
}

std::string AdamwSpec::key() const {
  constexpr std::string_view kAmax = "amax/";
  return f8::format("{}/{}", kKinds[0], amax.key().substr(kAmax.size()));
}

Status AdamwSpec::validate() const {
  F8_TRY(amax.validate());
  if (amax.block || amax.list || amax.noop_flag || amax.group) {
    return fail(
        ErrorCode::kInvalidArgument,
        "maxima of updated weights are over the tensor, rows and columns, with no option but "
        "/from_f32");
  }
  return {};
}

Stub AdamwSpec::stub() const {
  return function_stub("adamw.cuh", kKinds[0], amax_config(amax), "AdamwArgs", parameters().first,
                       launch());
}

LaunchTraits AdamwSpec::launch() const {
  return {};
}

ParameterBytes AdamwSpec::parameters() const {
  return {.first = sizeof(kernels::AdamwArgs)};
}

Result<AdamwCastSpec> AdamwCastSpec::parse(std::string_view, std::string_view rest) {
  return AdamwCastSpec{F8_TRY(CastSpec::parse("cast", rest))};
}

std::string AdamwCastSpec::key() const {
  constexpr std::string_view kCast = "cast/";
  return f8::format("{}/{}", kKinds[0], cast.key().substr(kCast.size()));
}

Status AdamwCastSpec::validate() const {
  F8_TRY(cast.validate());
  if (cast.one_launch || cast.list || cast.sums || cast.noop_flag || cast.count || cast.shard ||
      cast.group || amax_before(cast)) {
    return fail(ErrorCode::kInvalidArgument,
                "updated weights are cast with delayed scales or those of whole blocks, and the "
                "options /from_f32, /pow2 and /hold alone");
  }
  return {};
}

Stub AdamwCastSpec::stub() const {
  return function_stub("adamw.cuh", kKinds[0], cast_config(cast), "AdamwCastArgs",
                       parameters().first, launch());
}

LaunchTraits AdamwCastSpec::launch() const {
  return {};
}

ParameterBytes AdamwCastSpec::parameters() const {
  return {.first = sizeof(kernels::AdamwCastArgs)};
}

}  // namespace f8::codegen
