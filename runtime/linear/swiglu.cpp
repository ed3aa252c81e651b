#include "runtime/linear/swiglu.hpp"

#include "runtime/device/context_state.hpp"

namespace f8::runtime {

Result<SwigluCast> plan_swiglu_cast(Context& context, const FusedCast& cast,
                                    const CastOperand& operand, std::string_view recipe) {
  if (amax_before(cast.cast)) {
    return fail(
        ErrorCode::kUnsupported,
        "recipe {} scales silu(x) up by its maxima, for which it has to be in memory: compute "
        "it, and quantize it with FLOAT8_PLAIN",
        recipe);
  }
  const codegen::KernelSpec spec = codegen::SwigluCastSpec{cast.cast};
  F8_TRY(context.compile(std::span(&spec, 1)));
  return SwigluCast{F8_TRY(context.kernel(spec)), operand};
}

Status launch_swiglu_cast(const Context::State& context, const SwigluCast& cast,
                          const CallArguments& call, const void* up, int64_t ld_up, Stream stream) {
  const auto& spec = std::get<codegen::SwigluCastSpec>(cast.kernel->spec);
  const QuantizeOperand operand = cast.operand.at(call);
  const kernels::SwigluCastArgs args{
      .cast = cast_args(spec.cast, context.info.sm_count, std::span(&operand, 1)),
      .up = up,
      .ld_up = ld_up == 0 ? operand.cols : ld_up};
  return launch_with(args, context.driver, *cast.kernel, blocks_of(args.cast),
                     context.options.programmatic_launch, stream);
}

}  // namespace f8::runtime
