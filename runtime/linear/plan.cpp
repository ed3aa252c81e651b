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
  const int sm_count = context->device().sm_count;

  // Compiled side by side, so that what follows only loads.
  const auto table = context->table();
  const auto specs = F8_TRY(linear_kernel_specs(desc, table.get(), sm_count));
  F8_TRY(context->compile(specs));

  const LinearKernels& kernels = state->kernels;
  const auto plan_gemm = [&](const std::optional<GemmDesc>& gemm, GemmPlanPtr& out) -> Status {
    if (!gemm) return {};
    const GemmChoice choice = F8_TRY(linear_choice(desc, *gemm, table.get(), sm_count));
    out = F8_TRY(GemmPlan::create(context, *gemm, choice));
    return {};
  };
  LinearGemms& gemms = state->gemms;
  for (size_t i = 0; i < kernels.gemms.size(); ++i) {
    F8_TRY(plan_gemm(kernels.gemms[i], gemms.all[i]));
  }
  F8_TRY(plan_gemm(kernels.add_grad_weight, gemms.add_grad_weight));
  const auto& [output, input, weight] = gemms.all;
  if (input != nullptr && weight != nullptr &&
      GroupedGemm::fits(input->desc(), input->choice(), weight->desc(), weight->choice())) {
    gemms.gradients =
        F8_TRY(GroupedGemm::create(context, input->desc(), weight->desc(), input->choice()));
  }
  const auto gemm_bytes = [](const GemmPlanPtr& gemm) {
    return gemm == nullptr ? 0 : gemm->workspace_bytes();
  };
  state->layout = linear_layout(
      desc.shape, kernels, sm_count, gemm_bytes(output),
      std::max({gemm_bytes(input), gemm_bytes(weight), gemm_bytes(gemms.add_grad_weight)}));
  state->launches = F8_TRY(plan_launches(context, desc, kernels, gemms, state->layout));
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
  const GemmPlanPtr& plan = state_->gemms.all[static_cast<size_t>(gemm)];
  return plan == nullptr ? none : plan->choice();
}

}  // namespace f8::runtime
