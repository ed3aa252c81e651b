#include "codegen/specs/computed_cast.hpp"

#include "codegen/kernels/kernel_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {
namespace {

constexpr std::array<ComputedKernel, kComputed> kComputedCastKernels = {{
    {"swiglu_cast.cuh", "SwigluCastArgs", sizeof(kernels::SwigluCastArgs)},
    {"swiglu_cast.cuh", "SwigluBackwardArgs", sizeof(kernels::SwigluBackwardArgs)},
    {"rms_norm.cuh", "RmsNormCastArgs", sizeof(kernels::RmsNormCastArgs)},
}};

const ComputedKernel& computed_cast_kernel(const ComputedCastSpec& spec) {
  return kComputedCastKernels[static_cast<size_t>(spec.source)];
}

}  // namespace

Result<ComputedCastSpec> ComputedCastSpec::parse(std::string_view kind, std::string_view rest) {
  return ComputedCastSpec{F8_TRY(CastSpec::parse("cast", rest)), computed_of(kKinds, kind)};
}

std::string ComputedCastSpec::key() const {
  constexpr std::string_view kCast = "cast/";
  return f8::format("{}/{}", kKinds[static_cast<size_t>(source)], cast.key().substr(kCast.size()));
}

Status ComputedCastSpec::validate() const {
  F8_TRY(cast.validate());
  if (cast.one_launch || cast.list || cast.sums || cast.noop_flag || cast.from_f32 || cast.shard ||
      cast.group) {
    return fail(ErrorCode::kInvalidArgument,
                "a cast of what is computed has the options /pow2, /hold and /count alone");
  }
  return {};
}

Stub ComputedCastSpec::stub() const {
  const ComputedKernel& kernel = computed_cast_kernel(*this);
  return function_stub(kernel.file, kKinds[static_cast<size_t>(source)], cast_config(cast),
                       kernel.args, parameters().first, launch());
}

LaunchTraits ComputedCastSpec::launch() const {
  return cast.launch();
}

ParameterBytes ComputedCastSpec::parameters() const {
  return {.first = computed_cast_kernel(*this).bytes};
}

}  // namespace f8::codegen
