#include "codegen/specs/computed_amax.hpp"

#include "codegen/kernels/kernel_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {
namespace {

constexpr std::array<ComputedKernel, kComputed> kComputedAmaxKernels = {{
    {"swiglu_amax.cuh", "SwigluAmaxArgs", sizeof(kernels::SwigluAmaxArgs)},
    {"swiglu_amax.cuh", "SwigluBackwardAmaxArgs", sizeof(kernels::SwigluBackwardAmaxArgs)},
    {"rms_norm.cuh", "RmsNormAmaxArgs", sizeof(kernels::RmsNormAmaxArgs)},
}};

const ComputedKernel& computed_amax_kernel(const ComputedAmaxSpec& spec) {
  return kComputedAmaxKernels[static_cast<size_t>(spec.source)];
}

}  // namespace

Result<ComputedAmaxSpec> ComputedAmaxSpec::parse(std::string_view kind, std::string_view rest) {
  return ComputedAmaxSpec{F8_TRY(AmaxSpec::parse("amax", rest)), computed_of(kKinds, kind)};
}

std::string ComputedAmaxSpec::key() const {
  constexpr std::string_view kAmax = "amax/";
  return f8::format("{}/{}", kKinds[static_cast<size_t>(source)], amax.key().substr(kAmax.size()));
}

Status ComputedAmaxSpec::validate() const {
  F8_TRY(amax.validate());
  if (amax.block || amax.list || amax.noop_flag || amax.from_f32 || amax.group) {
    return fail(
        ErrorCode::kInvalidArgument,
        "maxima of what is computed are over the tensor, rows and columns, without options");
  }
  return {};
}

Stub ComputedAmaxSpec::stub() const {
  // A tensor's launch has six blocks an SM (amax_partials), all of which are to be resident.
  const bool bounded = !amax.row && !amax.col && amax.in != Dtype::kF32;
  const ComputedKernel& kernel = computed_amax_kernel(*this);
  return function_stub(kernel.file, kKinds[static_cast<size_t>(source)], amax_config(amax),
                       kernel.args, parameters().first, launch(), bounded ? 6 : 0);
}

LaunchTraits ComputedAmaxSpec::launch() const {
  return amax.launch();
}

ParameterBytes ComputedAmaxSpec::parameters() const {
  return {.first = computed_amax_kernel(*this).bytes};
}

}  // namespace f8::codegen
