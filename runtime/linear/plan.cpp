// Planning a linear: its kernels compiled and loaded, its products' configurations chosen, its
// buffers laid out.
#include <algorithm>
#include <limits>

#include "runtime/linear/state.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {
namespace {

// Grids are 32-bit, and rows and columns of a kernel's matrices are too.
Status check_size(Shape shape) {
  const int64_t limit = std::numeric_limits<int32_t>::max();
  if (cast_tiles(shape.m, shape.k) + cast_tiles(shape.n, shape.k) > limit ||
      cast_tiles(shape.m, shape.n) > limit) {
    return fail(ErrorCode::kInvalidArgument, "shape {}: more than 2^31 tiles of 128 by 128",
                to_string(shape));
  }
  return {};
}

}  // namespace

Linear::Linear(std::unique_ptr<State> state) : state_(std::move(state)) {}
Linear::~Linear() = default;

Result<std::shared_ptr<const Linear>> Linear::plan(const std::shared_ptr<Context>& context,
                                                   const LinearDesc& desc) {
  auto state = std::make_unique<State>();
  state->context = context;
  state->desc = desc;
  state->kernels = F8_TRY(linear_kernels(desc));
  F8_TRY(check_size(desc.shape));
  state->driver = &context->state().driver;
  state->primary = context->state().primary;
  state->programmatic = context->options().programmatic_launch;
  state->sm_count = context->device().sm_count;

  // Compiled side by side, so that what follows only loads.
  const auto table = context->table();
  const auto specs = F8_TRY(linear_kernel_specs(desc, table.get(), state->sm_count));
  F8_TRY(context->compile(specs));

  const auto load = [&](const std::array<Quantization, kWorks>& works,
                        State::Loaded& out) -> Status {
    for (size_t i = 0; i < kWorks; ++i) {
      for (const QuantizePass& pass : works[i]) {
        State::LoadedPass ready;
        if (pass.amax) ready.amax = F8_TRY(context->kernel(*pass.amax));
        ready.cast = F8_TRY(context->kernel(pass.cast));
        if (pass.one_launch &&
            (context->options().cooperative_launch || !codegen::is_cooperative(*pass.one_launch))) {
          ready.quantize = F8_TRY(context->kernel(*pass.one_launch));
        }
        if (pass.summing) ready.summing = F8_TRY(context->kernel(*pass.summing));
        out[i].push_back(ready);
      }
    }
    return {};
  };
  const LinearKernels& kernels = state->kernels;
  F8_TRY(load(kernels.works, state->loaded));
  F8_TRY(load(kernels.first_works, state->first_loaded));
  if (!kernels.slots.empty()) {
    state->scale_update = F8_TRY(context->kernel(codegen::ScaleUpdateSpec{}));
  }
  if (kernels.bias_grad) {
    state->column_sums = F8_TRY(context->kernel(codegen::ColumnSumsSpec{kernels.tensor_dtype}));
    state->bias_grad = F8_TRY(context->kernel(*kernels.bias_grad));
  }
  const auto plan_gemm = [&](const std::optional<GemmDesc>& gemm, GemmPlanPtr& out) -> Status {
    if (!gemm) return {};
    const GemmChoice choice = F8_TRY(linear_choice(desc, *gemm, table.get(), state->sm_count));
    out = F8_TRY(GemmPlan::create(context, *gemm, choice));
    return {};
  };
  for (size_t i = 0; i < kernels.gemms.size(); ++i) {
    F8_TRY(plan_gemm(kernels.gemms[i], state->gemms[i]));
  }
  F8_TRY(plan_gemm(kernels.add_grad_weight, state->add_grad_weight));
  if (const auto& input = state->gemms[1], &weight = state->gemms[2];
      input != nullptr && weight != nullptr &&
      GemmPair::fits(input->desc(), input->choice(), weight->desc(), weight->choice())) {
    state->gradients =
        F8_TRY(GemmPair::create(context, input->desc(), weight->desc(), input->choice()));
  }
  const auto gemm_bytes = [](const GemmPlanPtr& gemm) {
    return gemm == nullptr ? 0 : gemm->workspace_bytes();
  };
  state->layout = linear_layout(desc.shape, kernels, state->sm_count, gemm_bytes(state->gemms[0]),
                                std::max({gemm_bytes(state->gemms[1]), gemm_bytes(state->gemms[2]),
                                          gemm_bytes(state->add_grad_weight)}));
  return std::shared_ptr<const Linear>(new Linear(std::move(state)));
}

size_t Linear::workspace_bytes() const {
  return state_->layout.workspace_bytes;
}
size_t Linear::saved_bytes(bool weight_cache) const {
  return weight_cache ? state_->layout.saved_input_bytes : state_->layout.saved_bytes;
}
size_t Linear::weight_cache_bytes() const {
  return state_->layout.cache_bytes;
}
const std::vector<DelayedSlot>& Linear::scale_slots() const {
  return state_->kernels.slots;
}
const std::shared_ptr<Context>& Linear::context() const {
  return state_->context;
}
const LinearDesc& Linear::desc() const {
  return state_->desc;
}
const GemmChoice& Linear::choice(Gemm gemm) const {
  static const GemmChoice none;  // of a gradient that is not wanted
  const GemmPlanPtr& plan = state_->gemms[static_cast<size_t>(gemm)];
  return plan == nullptr ? none : plan->choice();
}

}  // namespace f8::runtime
