// The linear's forward and backward. Each is written once, as a sequence of named launches: run
// calls them in turn, and measuring keeps them as steps. Nothing on the way of a call allocates,
// locks or formats, errors excepted.
#include "runtime/linear.hpp"

#include <algorithm>
#include <limits>

#include "codegen/emit.hpp"
#include "runtime/context_state.hpp"
#include "runtime/cost_model.hpp"
#include "runtime/gemm_providers.hpp"
#include "runtime/linear_kernels.hpp"
#include "runtime/linear_layout.hpp"
#include "runtime/quantize.hpp"

namespace f8::runtime {
namespace {

// The index into LinearKernels::amax_dy and cast_dy.
enum Need : size_t { kBoth, kInputAlone, kWeightAlone };

Status check_pointer(const char* call, const char* name, const void* pointer) {
  if (pointer == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: {} is null", call, name);
  }
  if (!is_aligned(pointer)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: {} is not aligned to 16 bytes", call, name);
  }
  return {};
}

Status check_m(const char* call, int64_t m, int64_t planned) {
  if (m < 0 || m > planned) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: m is {}, the plan was made for 0 to {}", call, m,
                planned);
  }
  return {};
}

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

struct Linear::State {
  std::shared_ptr<Context> context;
  LinearDesc desc;
  LinearKernels kernels;
  const Driver* driver = nullptr;
  CUcontext primary = nullptr;
  bool programmatic = false;
  int sm_count = 0;
  const Kernel* amax = nullptr;
  const Kernel* cast = nullptr;
  const Kernel* amax_unsaved = nullptr;
  const Kernel* cast_unsaved = nullptr;
  std::array<const Kernel*, 3> amax_dy{};
  std::array<const Kernel*, 3> cast_dy{};
  std::array<std::shared_ptr<const GemmPlan>, 3> gemms;
  LinearLayout layout;

  [[nodiscard]] bool axis() const { return kernels.scale == codegen::ScaleMode::kAxis; }
  [[nodiscard]] const GemmPlan& gemm(Gemm g) const { return *gemms[static_cast<size_t>(g)]; }
  [[nodiscard]] size_t dw_bytes() const {
    return static_cast<size_t>(desc.shape.n * desc.shape.k) * size_bytes(desc.grad_weight_dtype);
  }

  [[nodiscard]] Status check(const ForwardCall& call, const void* workspace) const;
  [[nodiscard]] Status check(const BackwardCall& call, const void* workspace) const;
  // `step(name, launch)` is given each launch in order; launch(Stream) returns a Status.
  template <class Step>
  [[nodiscard]] Status forward(const ForwardCall& call, void* workspace, Step&& step) const;
  template <class Step>
  [[nodiscard]] Status backward(const BackwardCall& call, void* workspace, Step&& step) const;

  [[nodiscard]] Status clear_words(uint32_t* words, int64_t count, Stream stream) const {
    return driver->check(driver->memset_d32_async(reinterpret_cast<CUdeviceptr>(words), 0,
                                                  static_cast<size_t>(count), stream),
                         "cuMemsetD32Async");
  }
};

Status Linear::State::check(const ForwardCall& call, const void* workspace) const {
  F8_TRY(check_m("forward", call.m, desc.shape.m));
  if (call.m == 0) return {};
  F8_TRY(check_pointer("forward", "x", call.x));
  F8_TRY(check_pointer("forward", "w", call.w));
  F8_TRY(check_pointer("forward", "y", call.y));
  if (call.saved != nullptr) F8_TRY(check_pointer("forward", "saved", call.saved));
  return check_pointer("forward", "workspace", workspace);
}

Status Linear::State::check(const BackwardCall& call, const void* workspace) const {
  F8_TRY(check_m("backward", call.m, desc.shape.m));
  if (call.dw != nullptr) F8_TRY(check_pointer("backward", "dw", call.dw));
  if (call.m == 0 || (call.dx == nullptr && call.dw == nullptr)) return {};
  if (call.dx != nullptr) F8_TRY(check_pointer("backward", "dx", call.dx));
  F8_TRY(check_pointer("backward", "dy", call.dy));
  F8_TRY(check_pointer("backward", "saved", call.saved));
  return check_pointer("backward", "workspace", workspace);
}

template <class Step>
Status Linear::State::forward(const ForwardCall& call, void* workspace, Step&& step) const {
  F8_TRY(check(call, workspace));
  if (call.m == 0) return {};
  auto* work = static_cast<uint8_t*>(workspace);
  auto* saved = static_cast<uint8_t*>(call.saved);
  const LinearLayout::Forward& at = layout.forward;
  const int64_t n = desc.shape.n;
  const int64_t k = desc.shape.k;

  const bool training = saved != nullptr;

  std::array<QuantizeOperand, 2> operands;
  QuantizeOperand& x = operands[0];
  QuantizeOperand& w = operands[1];
  x = {.x = call.x, .rows = call.m, .cols = k, .q = work + at.x_q};
  w = {.x = call.w, .rows = n, .cols = k, .q = work + at.w_q};
  if (training) {
    x.qt = saved + layout.saved.x_qt;
    w.qt = saved + layout.saved.w_qt;
  }
  auto* amax_words = reinterpret_cast<uint32_t*>(work + at.amax);
  GemmCall gemm_call{.a = x.q, .b = w.q, .d = call.y, .m = call.m};
  if (axis()) {
    x.col_amax = amax_words;
    w.row_amax = x.col_amax + k;
    w.col_amax = w.row_amax + n;
    x.row_amax = w.col_amax + k;
    x.inv_row = reinterpret_cast<float*>(work + at.x_inv);
    w.inv_row = reinterpret_cast<float*>(work + at.w_inv);
    if (training) {
      x.inv_col = reinterpret_cast<float*>(saved + layout.saved.x_scale);
      w.inv_col = reinterpret_cast<float*>(saved + layout.saved.w_scale);
    }
    gemm_call.inv_scale_a = x.inv_row;
    gemm_call.inv_scale_b = w.inv_row;
    F8_TRY(step("clear amax", [this, amax_words, words = k + n + k + call.m](Stream stream) {
      return clear_words(amax_words, words, stream);
    }));
  } else {
    x.partials = amax_words;
    w.partials = reinterpret_cast<uint32_t*>(work + at.w_amax);
    x.scale = reinterpret_cast<float*>(training ? saved + layout.saved.x_scale : work + at.x_inv);
    w.scale = reinterpret_cast<float*>(training ? saved + layout.saved.w_scale : work + at.w_inv);
    gemm_call.inv_scale_a = x.scale + kernels::kInverse;
    gemm_call.inv_scale_b = w.scale + kernels::kInverse;
  }
  const Kernel& measure = training ? *amax : *amax_unsaved;
  const Kernel& convert = training ? *cast : *cast_unsaved;
  const auto measure_args =
      amax_args(training ? kernels.amax : kernels.amax_unsaved, sm_count, operands);
  const auto convert_args =
      cast_args(training ? kernels.cast : kernels.cast_unsaved, sm_count, operands);
  F8_TRY(step("amax x,w", [this, &measure, measure_args](Stream stream) {
    return launch_amax(*driver, measure, measure_args, programmatic, stream);
  }));
  F8_TRY(step("cast x,w", [this, &convert, convert_args](Stream stream) {
    return launch_cast(*driver, convert, convert_args, programmatic, stream);
  }));
  return step("gemm output", [this, gemm_call, scratch = work + at.gemm](Stream stream) {
    return gemm(Gemm::kOutput).run(gemm_call, scratch, stream);
  });
}

template <class Step>
Status Linear::State::backward(const BackwardCall& call, void* workspace, Step&& step) const {
  F8_TRY(check(call, workspace));
  if (call.m == 0) {  // the gradient of the weight of an empty batch is zero
    if (call.dw == nullptr) return {};
    return step("clear dw", [this, dw = call.dw](Stream stream) {
      return zero(*driver, primary, dw, dw_bytes(), stream);
    });
  }
  if (call.dx == nullptr && call.dw == nullptr) return {};
  const Need need = call.dw == nullptr ? kInputAlone : call.dx == nullptr ? kWeightAlone : kBoth;
  auto* work = static_cast<uint8_t*>(workspace);
  const auto* saved = static_cast<const uint8_t*>(call.saved);
  const LinearLayout::Backward& at = layout.backward;
  const int64_t n = desc.shape.n;

  QuantizeOperand dy{
      .x = call.dy, .rows = call.m, .cols = n, .q = work + at.dy_q, .qt = work + at.dy_qt};
  auto* amax_words = reinterpret_cast<uint32_t*>(work + at.amax);
  auto* row_scale = reinterpret_cast<float*>(work + at.dy_row_scale);
  const auto* x_scale = reinterpret_cast<const float*>(saved + layout.saved.x_scale);
  const auto* w_scale = reinterpret_cast<const float*>(saved + layout.saved.w_scale);
  GemmCall input{.a = dy.q, .b = saved + layout.saved.w_qt, .d = call.dx, .m = call.m};
  GemmCall weight{.a = dy.qt, .b = saved + layout.saved.x_qt, .d = call.dw, .m = call.m};
  if (axis()) {
    dy.col_amax = amax_words;
    dy.row_amax = dy.col_amax + n;
    dy.inv_row = row_scale;
    dy.inv_col = reinterpret_cast<float*>(work + at.dy_col_scale);
    input.inv_scale_a = dy.inv_row;
    input.inv_scale_b = w_scale;
    weight.inv_scale_a = dy.inv_col;
    weight.inv_scale_b = x_scale;
    F8_TRY(step("clear amax", [this, amax_words, words = n + call.m](Stream stream) {
      return clear_words(amax_words, words, stream);
    }));
  } else {
    dy.partials = amax_words;
    dy.scale = row_scale;
    input.inv_scale_a = weight.inv_scale_a = dy.scale + kernels::kInverse;
    input.inv_scale_b = w_scale + kernels::kInverse;
    weight.inv_scale_b = x_scale + kernels::kInverse;
  }
  const std::span<const QuantizeOperand> operands(&dy, 1);
  F8_TRY(step("amax dy", [this, need, args = amax_args(kernels.amax_dy[need], sm_count, operands)](
                             Stream stream) {
    return launch_amax(*driver, *amax_dy[need], args, programmatic, stream);
  }));
  F8_TRY(step("cast dy", [this, need, args = cast_args(kernels.cast_dy[need], sm_count, operands)](
                             Stream stream) {
    return launch_cast(*driver, *cast_dy[need], args, programmatic, stream);
  }));
  if (call.dx != nullptr) {
    F8_TRY(step("gemm grad_input", [this, input, scratch = work + at.gemm](Stream stream) {
      return gemm(Gemm::kGradInput).run(input, scratch, stream);
    }));
  }
  if (call.dw == nullptr) return {};
  return step("gemm grad_weight", [this, weight, scratch = work + at.gemm](Stream stream) {
    return gemm(Gemm::kGradWeight).run(weight, scratch, stream);
  });
}

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
  std::vector<codegen::KernelSource> sources;
  for (const auto& spec : F8_TRY(linear_kernel_specs(desc, table.get(), state->sm_count))) {
    sources.push_back(F8_TRY(codegen::emit(spec)));
  }
  F8_TRY(context->state().cache.get_all(sources));

  const LinearKernels& kernels = state->kernels;
  state->amax = F8_TRY(context->kernel(kernels.amax));
  state->cast = F8_TRY(context->kernel(kernels.cast));
  state->amax_unsaved = F8_TRY(context->kernel(kernels.amax_unsaved));
  state->cast_unsaved = F8_TRY(context->kernel(kernels.cast_unsaved));
  for (size_t i = 0; i < kernels.cast_dy.size(); ++i) {
    state->amax_dy[i] = F8_TRY(context->kernel(kernels.amax_dy[i]));
    state->cast_dy[i] = F8_TRY(context->kernel(kernels.cast_dy[i]));
  }
  for (const Gemm gemm : kGemms) {
    const auto i = static_cast<size_t>(gemm);
    const GemmChoice choice =
        desc.choices[i] ? *desc.choices[i]
                        : F8_TRY(choose_gemm(table.get(), kernels.gemms[i], state->sm_count));
    state->gemms[i] = F8_TRY(GemmPlan::create(context, kernels.gemms[i], choice));
  }
  state->layout = linear_layout(
      desc.shape, kernels.scale, state->sm_count, state->gemms[0]->workspace_bytes(),
      std::max(state->gemms[1]->workspace_bytes(), state->gemms[2]->workspace_bytes()));
  return std::shared_ptr<const Linear>(new Linear(std::move(state)));
}

size_t Linear::workspace_bytes() const {
  return state_->layout.workspace_bytes;
}
size_t Linear::saved_bytes() const {
  return state_->layout.saved_bytes;
}
const LinearDesc& Linear::desc() const {
  return state_->desc;
}
const GemmChoice& Linear::choice(Gemm gemm) const {
  return state_->gemm(gemm).choice();
}

Status Linear::forward(const ForwardCall& call, void* workspace, Stream stream) const {
  const ScopedContext current(*state_->driver, state_->primary);
  F8_TRY(current.status());
  return state_->forward(call, workspace,
                         [stream](const char*, const auto& launch) { return launch(stream); });
}

Status Linear::backward(const BackwardCall& call, void* workspace, Stream stream) const {
  const ScopedContext current(*state_->driver, state_->primary);
  F8_TRY(current.status());
  return state_->backward(call, workspace,
                          [stream](const char*, const auto& launch) { return launch(stream); });
}

namespace {

// Keeps launches as steps; a call that cannot run becomes one step that says why.
template <class Sequence>
std::vector<Step> collect(const Driver& driver, CUcontext primary, const char* name,
                          Sequence&& sequence) {
  std::vector<Step> steps;
  const Status status = sequence([&](const char* step, auto&& launch) -> Status {
    steps.push_back({step, [&driver, primary, launch](Stream stream) -> Status {
                       const ScopedContext current(driver, primary);
                       F8_TRY(current.status());
                       return launch(stream);
                     }});
    return {};
  });
  if (!status) {
    steps.assign(
        1, {name, [error = status.error()](Stream) -> Status { return std::unexpected(error); }});
  }
  return steps;
}

}  // namespace

std::vector<Step> Linear::forward_steps(const ForwardCall& call, void* workspace) const {
  return collect(*state_->driver, state_->primary, "forward",
                 [&](auto&& keep) { return state_->forward(call, workspace, keep); });
}

std::vector<Step> Linear::backward_steps(const BackwardCall& call, void* workspace) const {
  return collect(*state_->driver, state_->primary, "backward",
                 [&](auto&& keep) { return state_->backward(call, workspace, keep); });
}

}  // namespace f8::runtime
