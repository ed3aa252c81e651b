// Planning a linear compiles and loads its kernels, chooses its GEMMs' configurations, lays out its
// buffers and lists its launches. A call is checked, bound to the launches that were planned for
// its kind, and run; or it is given as steps, which are the same launches one by one. Nothing on
// the way of a call allocates, locks or formats, errors excepted.
#include "runtime/linear/linear.hpp"

#include <algorithm>
#include <limits>

#include "runtime/linear/state.hpp"
#include "runtime/linear/tensors/fp8_tensor.hpp"

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
  const auto table = context->table();
  auto chosen = F8_TRY(choose_kernels(desc, table.get(), context->device().sm_count));
  F8_TRY(check_size(desc.shape));
  F8_TRY(context->compile(chosen.specs()));  // side by side, so that what follows only loads
  return plan(context, desc, std::move(chosen));
}

Result<std::shared_ptr<const Linear>> Linear::plan(const std::shared_ptr<Context>& context,
                                                   const LinearDesc& desc, ChosenKernels chosen) {
  F8_TRY(check_size(desc.shape));
  auto state = std::make_unique<State>();
  state->context = context;
  state->desc = desc;
  state->driver = &context->state().driver;
  state->primary = context->state().primary;
  const int sm_count = context->device().sm_count;

  const bool groups_gradients = chosen.has_grouped_gradients();
  state->kernels = std::move(chosen.kernels);
  const LinearKernels& kernels = state->kernels;
  LinearGemms& gemms = state->gemms;
  for (size_t i = 0; i < kernels.gemms.size(); ++i) {
    if (kernels.gemms[i]) {
      gemms.all[i] = F8_TRY(GemmPlan::create(context, *kernels.gemms[i], *chosen.gemms[i]));
    }
    if (kernels.adding[i]) {
      gemms.adding[i] = F8_TRY(GemmPlan::create(context, *kernels.adding[i], *chosen.adding[i]));
    }
  }
  if (groups_gradients) {
    gemms.gradients = F8_TRY(
        GroupedGemm::create(context, *kernels.gemms[1], *kernels.gemms[2], *chosen.gemms[1]));
  }
  const auto gemm_bytes = [&](Gemm gemm) {
    size_t most = 0;
    for (const auto* plans : {&gemms.all, &gemms.adding}) {
      const GemmPlanPtr& plan = (*plans)[static_cast<size_t>(gemm)];
      if (plan != nullptr) most = std::max(most, plan->workspace_bytes());
    }
    return most;
  };
  state->layout =
      linear_layout(desc.shape, kernels, sm_count, gemm_bytes(Gemm::kOutput),
                    std::max(gemm_bytes(Gemm::kGradInput), gemm_bytes(Gemm::kGradWeight)));
  state->launches = F8_TRY(plan_launches(context, desc, kernels, gemms, state->layout));
  return std::shared_ptr<const Linear>(new Linear(std::move(state)));
}

size_t Linear::workspace_bytes() const {
  return std::max(forward_workspace_bytes(false, false),
                  backward_workspace_bytes(false, false, false));
}
size_t Linear::forward_workspace_bytes(bool x_fp8, bool w_fp8) const {
  return state_->layout.forward_bytes.of(x_fp8, w_fp8, true);
}
size_t Linear::backward_workspace_bytes(bool x_fp8, bool w_fp8, bool dy_fp8) const {
  return state_->layout.backward_bytes.of(x_fp8, w_fp8, dy_fp8);
}
size_t Linear::workspace_bytes(const ForwardCall& call) const {
  return state_->workspace_bytes(call);
}
size_t Linear::workspace_bytes(const BackwardCall& call) const {
  return state_->workspace_bytes(call);
}
size_t Linear::saved_bytes(bool w_fp8, bool x_fp8) const {
  return state_->layout.saved_bytes_of(x_fp8, w_fp8);
}

float8_tensor Linear::State::saved_view(Tensor tensor, const Fp8Refs& refs, const void* saved,
                                        int64_t rows) const {
  CallArguments call;
  call.set(Slot::kSaved, saved);
  return tensor_view({.qt = refs.qt, .qt_inverse = refs.qt_inverse}, call, rows, desc.shape.k,
                     kernels.of(tensor));
}

float8_tensor Linear::saved_x(const void* saved, int64_t m) const {
  return state_->saved_view(Tensor::kInput, state_->layout.backward_x, saved, m);
}

float8_tensor Linear::saved_w(const void* saved) const {
  return state_->saved_view(Tensor::kWeight, state_->layout.backward_w, saved, desc().shape.n);
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

template <class Call>
Status Linear::State::run(const char* name, const Call& call, Stream stream,
                          AmaxReducer reduce) const {
  const ScopedContext current(*driver, primary);
  F8_TRY(current.status());
  F8_TRY(check_device(name, call, stream));
  F8_TRY(check(call));
  CallArguments arguments;
  arguments.reduce = reduce;
  for (const LaunchList* list : bind(call, arguments)) {
    F8_TRY(runtime::run(*list, context->state(), arguments, stream));
  }
  return {};
}

// A call that cannot run becomes one step that says why.
template <class Call>
std::vector<Step> Linear::State::steps(const char* name, const Call& call) const {
  if (const Status good = check(call); !good) {
    return {{name, [error = good.error()](Stream) -> Status { return std::unexpected(error); }}};
  }
  CallArguments arguments;
  std::vector<Step> steps;
  for (const LaunchList* list : bind(call, arguments)) {
    const LaunchRange& range = range_at(*list, arguments.m);
    for (size_t i = 0; i < range.launches.size(); ++i) {
      const auto run = [this, &launch = range.launches[i], arguments](Stream stream) -> Status {
        const ScopedContext current(*driver, primary);
        F8_TRY(current.status());
        return launch({context->state(), arguments, stream, false});
      };
      steps.push_back({range.labels[i].name, run, range.labels[i].bytes.at(arguments.m)});
    }
  }
  return steps;
}

Status Linear::forward(const ForwardCall& call, Stream stream, AmaxReducer reduce) const {
  return state_->run("float8_linear_forward", call, stream, reduce);
}

Status Linear::backward(const BackwardCall& call, Stream stream, AmaxReducer reduce) const {
  return state_->run("float8_linear_backward", call, stream, reduce);
}

std::vector<Step> Linear::forward_steps(const ForwardCall& call) const {
  return state_->steps("float8_linear_forward", call);
}

std::vector<Step> Linear::backward_steps(const BackwardCall& call) const {
  return state_->steps("float8_linear_backward", call);
}

}  // namespace f8::runtime
