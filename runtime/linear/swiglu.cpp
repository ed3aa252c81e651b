#include "runtime/linear/swiglu.hpp"

#include "runtime/device/context_state.hpp"
#include "runtime/linear/plan_casts.hpp"

namespace f8::runtime {
namespace {

Status check_scales(const codegen::CastSpec& cast, std::string_view recipe) {
  if (!amax_before(cast)) return {};
  return fail(
      ErrorCode::kUnsupported,
      "recipe {} scales silu(x) up and its gradients by their maxima, for which they have to "
      "be in memory: compute them, and quantize them with FLOAT8_PLAIN",
      recipe);
}

}  // namespace

Result<SwigluCasts> SwigluCasts::plan(Context& context, const LinearKernels& kernels,
                                      CopySet copies, const TensorBuffers& at, Ref first_amaxes,
                                      bool backward, std::string_view recipe) {
  SwigluCasts all;
  all.backward_ = backward;
  all.amaxes_ = first_amaxes;
  all.slots_ = kernels.slots.size();
  for (const bool first : {false, true}) {
    if (first && kernels.slots.empty()) continue;
    for (const KernelPass& pass : kernels.passes(copies, first)) {
      for (const FusedCast& cast : pass.casts) {
        if (!first) F8_TRY(check_scales(cast.cast, recipe));
        const codegen::KernelSpec spec = codegen::SwigluCastSpec{cast.cast, backward};
        F8_TRY(context.compile(std::span(&spec, 1)));
        Cast made{F8_TRY(context.kernel(spec)), cast_operand(cast, at, Slot::kAmax)};
        if (first && cast.slot >= 0) made.operand.partials = word_at(first_amaxes, cast.slot);
        (first ? all.first_ : all.casts_).push_back(made);
        if (first || cast.slot < 0) continue;
        made.operand.recorded_amax = word_at(first_amaxes, cast.slot);
        made.operand.counters = {};
        all.recording_.push_back(made);
      }
    }
  }
  return all;
}

Status SwigluCasts::launch(const Context::State& context, const Cast& cast, const SwigluCall& call,
                           Stream stream) const {
  const auto& spec = std::get<codegen::SwigluCastSpec>(cast.kernel->spec);
  const std::array operands = {cast.operand.at(call.gate), cast.operand.at(call.up)};
  kernels::CastArgs casts = cast_args<kernels::CastArgs>(
      spec.cast, context.info.sm_count, std::span(operands).first(backward_ ? 2 : 1));
  for (kernels::CastTensor& tensor : casts.tensors) {
    tensor.first_block = 0;  // a block has a tile of each tensor
    if (amax_before(spec.cast)) tensor.partial_count = 1;
  }
  const int64_t blocks = casts.tensors[0].blocks;
  const int64_t ld = call.ld_factor == 0 ? operands[0].cols : call.ld_factor;
  const bool programmatic = context.options.programmatic_launch;
  if (backward_) {
    const kernels::SwigluBackwardArgs args{.cast = casts, .grad = call.factor, .ld_grad = ld};
    return launch_with(args, context.driver, *cast.kernel, blocks, programmatic, stream);
  }
  const kernels::SwigluCastArgs args{.cast = casts, .up = call.factor, .ld_up = ld};
  return launch_with(args, context.driver, *cast.kernel, blocks, programmatic, stream);
}

Status SwigluCasts::run(const Context::State& context, SwigluCall& call, Stream stream) const {
  if (call.first_step) {
    auto* const amaxes = call.gate.at<uint32_t>(amaxes_);
    call.up.set(Slot::kWorkspace, call.gate.at<uint32_t>(Slot::kWorkspace) + slots_);
    F8_TRY(set_words(context.driver, amaxes, 0, 2 * slots_, stream));
    for (const Cast& cast : recording_) F8_TRY(launch(context, cast, call, stream));
  }
  for (const Cast& cast : call.first_step ? first_ : casts_) {
    F8_TRY(launch(context, cast, call, stream));
  }
  return {};
}

}  // namespace f8::runtime
