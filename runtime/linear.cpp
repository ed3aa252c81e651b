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

Status check_pointer(const char* call, const char* name, const void* pointer) {
  if (pointer == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: {} is null", call, name);
  }
  if (!is_aligned(pointer)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: {} is not aligned to 16 bytes", call, name);
  }
  return {};
}

Status check_optional(const char* call, const char* name, const void* pointer) {
  return pointer == nullptr ? Status() : check_pointer(call, name, pointer);
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

// A tensor of a call and the places of what is made of it.
struct Place {
  const void* x = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  uint8_t* q = nullptr;
  uint8_t* qt = nullptr;
  float* q_scale = nullptr;
  float* qt_scale = nullptr;
  uint32_t* partials = nullptr;
  uint32_t* words = nullptr;
  WordLayout word{};
};

QuantizeOperand operand_of(const Visit& visit, const Place& place, const ScaleSlots& slots) {
  using codegen::ScaleMode;
  const codegen::CastSpec& cast = visit.cast;
  const bool lines = (cast.q && cast.scale_q == ScaleMode::kAxis) ||
                     (cast.qt && cast.scale_qt == ScaleMode::kAxis);
  QuantizeOperand operand{.x = place.x, .rows = place.rows, .cols = place.cols};
  operand.partials = lines ? place.words + place.word.tensor : place.partials;
  operand.row_amax = place.words + place.word.row;
  operand.col_amax = place.words + place.word.column;
  operand.q = place.q;
  operand.qt = place.qt;
  operand.scale = cast.qt && cast.scale_qt == ScaleMode::kTensor ? place.qt_scale : place.q_scale;
  operand.inv_row = place.q_scale;
  operand.inv_col = place.qt_scale;
  if (visit.slot >= 0) {
    operand.delayed = slots.scale + visit.slot * kernels::kScaleStride;
    operand.recorded_amax = slots.amax + visit.slot;
  }
  return operand;
}

double cast_bytes(const codegen::CastSpec& spec, double elements) {
  return elements *
         (static_cast<double>(size_bytes(spec.in)) + (spec.q ? 1 : 0) + (spec.qt ? 1 : 0));
}

// The inverse scales of a copy for the matmul.
const float* inverse_of(const CastSetting& setting, const float* scale) {
  return setting.granularity == Granularity::kTensor ? scale + kernels::kInverse : scale;
}

}  // namespace

struct Linear::State {
  struct LoadedPass {
    const Kernel* amax = nullptr;
    const Kernel* cast = nullptr;
  };
  using Loaded = std::array<std::vector<LoadedPass>, kWorks>;  // beside the kernels' works

  std::shared_ptr<Context> context;
  LinearDesc desc;
  LinearKernels kernels;
  const Driver* driver = nullptr;
  CUcontext primary = nullptr;
  bool programmatic = false;
  int sm_count = 0;
  Loaded loaded;
  Loaded first_loaded;
  std::array<GemmPlanPtr, 3> gemms;  // null: not wanted
  GemmPlanPtr add_grad_weight;
  std::shared_ptr<const GemmPair> gradients;  // both in one launch, where their choices allow it
  LinearLayout layout;

  [[nodiscard]] const GemmPlan& gemm(Gemm g) const { return *gemms[static_cast<size_t>(g)]; }
  [[nodiscard]] bool is_fp8(Gemm g) const { return desc.recipe.at(g).is_fp8(); }
  [[nodiscard]] size_t dw_bytes() const {
    return static_cast<size_t>(desc.shape.n * desc.shape.k) * size_bytes(desc.grad_weight_dtype);
  }

  [[nodiscard]] Status check(const ForwardCall& call, const void* workspace) const;
  [[nodiscard]] Status check(const BackwardCall& call, const void* workspace) const;
  [[nodiscard]] Status check(const WeightCall& call, const void* workspace) const;
  [[nodiscard]] Status check_scales(const char* call, const ScaleSlots& scales) const;

  [[nodiscard]] Place input_place(const ForwardCall& call, uint8_t* work, uint8_t* saved) const;
  [[nodiscard]] Place weight_place(const void* w, uint8_t* work) const;
  // With the copies in a weight cache.
  [[nodiscard]] Place cached_weight(const void* w, const void* cache, uint8_t* work) const;
  // The inverse scales of q, which a visit that also wrote qt may have left with it.
  [[nodiscard]] const float* inverse_q(Tensor tensor, const Place& place, bool with_qt) const {
    const Copies& copies = kernels.of(tensor);
    return inverse_of(*copies.q, with_qt && copies.share_scale() ? place.qt_scale : place.q_scale);
  }
  [[nodiscard]] const float* inverse_qt(Tensor tensor, const Place& place) const {
    return inverse_of(*kernels.of(tensor).qt, place.qt_scale);
  }

  // `step(name, bytes, launch)` is given each launch in order; launch(Stream) returns a Status.
  // `places` are indexed by Tensor; amax words [first_word, last_word) are the work's.
  template <class Step>
  [[nodiscard]] Status quantize(Work work, bool first, const std::array<Place, 3>& places,
                                const ScaleSlots& scales, uint32_t* first_word, int64_t word_count,
                                Step&& step) const;
  template <class Step>
  [[nodiscard]] Status forward(const ForwardCall& call, void* workspace, Step&& step) const;
  template <class Step>
  [[nodiscard]] Status backward(const BackwardCall& call, void* workspace, Step&& step) const;
  template <class Step>
  [[nodiscard]] Status cast_weight(const WeightCall& call, void* workspace, Step&& step) const;

  [[nodiscard]] Status clear_words(uint32_t* words, int64_t count, Stream stream) const {
    return driver->check(driver->memset_d32_async(reinterpret_cast<CUdeviceptr>(words), 0,
                                                  static_cast<size_t>(count), stream),
                         "cuMemsetD32Async");
  }
};

Status Linear::State::check_scales(const char* call, const ScaleSlots& scales) const {
  if (kernels.slots.empty()) return {};
  if (scales.amax == nullptr || scales.scale == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}: scales is empty; recipe {} has delayed scaling, see DelayedScales::slots",
                call, desc.recipe.name);
  }
  return {};
}

Status Linear::State::check(const ForwardCall& call, const void* workspace) const {
  F8_TRY(check_m("forward", call.m, desc.shape.m));
  if (call.m == 0) return {};
  F8_TRY(check_pointer("forward", "x", call.x));
  if (call.weight_cache == nullptr || !is_fp8(Gemm::kOutput)) {
    F8_TRY(check_pointer("forward", "w", call.w));
  }
  F8_TRY(check_pointer("forward", "y", call.y));
  if (desc.bias) F8_TRY(check_pointer("forward", "bias", call.bias));
  if (!desc.bias && call.bias != nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "forward: a bias is given, the plan has none; set LinearDesc::bias");
  }
  F8_TRY(check_optional("forward", "saved", call.saved));
  F8_TRY(check_optional("forward", "weight_cache", call.weight_cache));
  F8_TRY(check_scales("forward", call.scales));
  return check_pointer("forward", "workspace", workspace);
}

Status Linear::State::check(const BackwardCall& call, const void* workspace) const {
  F8_TRY(check_m("backward", call.m, desc.shape.m));
  const bool dx = call.dx != nullptr;
  const bool dw = call.dw != nullptr;
  F8_TRY(check_optional("backward", "dw", call.dw));
  if (dw && call.accumulate && add_grad_weight == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "backward: accumulate is set, the plan has no product that adds; set "
                "LinearDesc::accumulate_grad_weight");
  }
  if (dx && !desc.needs_grad_input) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "backward: dx is given, the plan was made without needs_grad_input");
  }
  if (call.m == 0 || (!dx && !dw)) return {};
  F8_TRY(check_optional("backward", "dx", call.dx));
  F8_TRY(check_pointer("backward", "dy", call.dy));
  F8_TRY(check_optional("backward", "weight_cache", call.weight_cache));
  const bool reads_weight = dx && is_fp8(Gemm::kGradInput) && call.weight_cache == nullptr;
  if (reads_weight || (dw && is_fp8(Gemm::kGradWeight))) {
    F8_TRY(check_pointer("backward", "saved", call.saved));
  }
  const auto check_source = [&](const char* name, const void* pointer, Gemm gemm) -> Status {
    if (pointer == nullptr) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument,
                  "backward: {} is null; recipe {} computes {} in high precision, from {} itself",
                  name, desc.recipe.name, to_string(gemm), name);
    }
    return check_pointer("backward", name, pointer);
  };
  if (dx && !is_fp8(Gemm::kGradInput)) F8_TRY(check_source("w", call.w, Gemm::kGradInput));
  if (dw && !is_fp8(Gemm::kGradWeight)) F8_TRY(check_source("x", call.x, Gemm::kGradWeight));
  F8_TRY(check_scales("backward", call.scales));
  return check_pointer("backward", "workspace", workspace);
}

Status Linear::State::check(const WeightCall& call, const void* workspace) const {
  F8_TRY(check_pointer("cast_weight", "w", call.w));
  F8_TRY(check_pointer("cast_weight", "cache", call.cache));
  F8_TRY(check_scales("cast_weight", call.scales));
  return check_pointer("cast_weight", "workspace", workspace);
}

Place Linear::State::input_place(const ForwardCall& call, uint8_t* work, uint8_t* saved) const {
  Place place{.x = call.x, .rows = call.m, .cols = desc.shape.k};
  place.q = work + layout.x.q;
  place.q_scale = reinterpret_cast<float*>(work + layout.x.q_scale);
  place.partials = reinterpret_cast<uint32_t*>(work + layout.x_partials);
  place.words = reinterpret_cast<uint32_t*>(work + layout.words);
  place.word = layout.x_words;
  if (saved != nullptr) {
    place.qt = saved + layout.x.qt;
    place.qt_scale = reinterpret_cast<float*>(saved + layout.x.qt_scale);
  }
  return place;
}

Place Linear::State::weight_place(const void* w, uint8_t* work) const {
  Place place{.x = w, .rows = desc.shape.n, .cols = desc.shape.k};
  place.partials = reinterpret_cast<uint32_t*>(work + layout.w_partials);
  place.words = reinterpret_cast<uint32_t*>(work + layout.words);
  place.word = layout.w_words;
  return place;
}

Place Linear::State::cached_weight(const void* w, const void* cache, uint8_t* work) const {
  Place place = weight_place(w, work);
  auto* at = static_cast<uint8_t*>(const_cast<void*>(cache));
  place.q = at + layout.cache.q;
  place.qt = at + layout.cache.qt;
  place.q_scale = reinterpret_cast<float*>(at + layout.cache.q_scale);
  place.qt_scale = reinterpret_cast<float*>(at + layout.cache.qt_scale);
  return place;
}

template <class Step>
Status Linear::State::quantize(Work work, bool first, const std::array<Place, 3>& places,
                               const ScaleSlots& scales, uint32_t* first_word, int64_t word_count,
                               Step&& step) const {
  const bool from_tensors = first && !kernels.slots.empty();
  const auto index = static_cast<size_t>(work);
  const Quantization& passes = (from_tensors ? kernels.first_works : kernels.works)[index];
  const std::vector<LoadedPass>& ready = (from_tensors ? first_loaded : loaded)[index];
  const bool raises = std::ranges::any_of(passes, [](const QuantizePass& pass) {
    return pass.amax && (pass.amax->row || pass.amax->col);
  });
  if (raises) {
    F8_TRY(step("clear amax", 0.0, [this, first_word, word_count](Stream stream) {
      return clear_words(first_word, word_count, stream);
    }));
  }
  for (size_t i = 0; i < passes.size(); ++i) {
    const QuantizePass& pass = passes[i];
    std::array<QuantizeOperand, kernels::kMaxTensors> list;
    double elements = 0;
    for (size_t v = 0; v < pass.visits.size(); ++v) {
      const Visit& visit = pass.visits[v];
      list[v] = operand_of(visit, places[static_cast<size_t>(visit.tensor)], scales);
      elements += static_cast<double>(list[v].rows) * static_cast<double>(list[v].cols);
    }
    const std::span<const QuantizeOperand> operands(list.data(), pass.visits.size());
    if (pass.amax) {
      F8_TRY(step(pass.amax_name.c_str(), cast_bytes({.q = false, .qt = false}, elements),
                  [this, kernel = ready[i].amax,
                   args = amax_args(*pass.amax, sm_count, operands)](Stream stream) {
                    return launch_amax(*driver, *kernel, args, programmatic, stream);
                  }));
    }
    F8_TRY(step(
        pass.cast_name.c_str(), cast_bytes(pass.cast, elements),
        [this, kernel = ready[i].cast, args = cast_args(pass.cast, sm_count, operands)](
            Stream stream) { return launch_cast(*driver, *kernel, args, programmatic, stream); }));
  }
  return {};
}

template <class Step>
Status Linear::State::forward(const ForwardCall& call, void* workspace, Step&& step) const {
  F8_TRY(check(call, workspace));
  if (call.m == 0) return {};
  auto* work = static_cast<uint8_t*>(workspace);
  auto* saved = static_cast<uint8_t*>(call.saved);
  const bool training = saved != nullptr;
  const bool cached = call.weight_cache != nullptr;

  std::array<Place, 3> places;
  Place& x = places[static_cast<size_t>(Tensor::kInput)];
  Place& w = places[static_cast<size_t>(Tensor::kWeight)];
  x = input_place(call, work, saved);
  if (cached) {
    w = cached_weight(call.w, call.weight_cache, work);
  } else {
    w = weight_place(call.w, work);
    w.q = work + layout.w.q;
    w.q_scale = reinterpret_cast<float*>(work + layout.w.q_scale);
    if (training) {
      w.qt = saved + layout.w.qt;
      w.qt_scale = reinterpret_cast<float*>(saved + layout.w.qt_scale);
    }
  }
  const Work what = cached ? (training ? Work::kInput : Work::kInputUnsaved)
                           : (training ? Work::kForward : Work::kForwardUnsaved);
  const int64_t first_word = cached ? layout.input_words : 0;
  F8_TRY(quantize(what, call.first_step, places, call.scales, x.words + first_word,
                  layout.x_words.row + call.m - first_word, step));

  GemmCall gemm_call{.a = call.x, .b = call.w, .d = call.y, .m = call.m};
  gemm_call.bias = call.bias;
  if (is_fp8(Gemm::kOutput)) {
    gemm_call.a = x.q;
    gemm_call.b = w.q;
    gemm_call.inv_scale_a = inverse_q(Tensor::kInput, x, training);
    gemm_call.inv_scale_b = inverse_q(Tensor::kWeight, w, training || cached);
  }
  return step("gemm output", 0.0,
              [this, gemm_call, scratch = work + layout.forward_gemm](Stream stream) {
                return gemm(Gemm::kOutput).run(gemm_call, scratch, stream);
              });
}

template <class Step>
Status Linear::State::backward(const BackwardCall& call, void* workspace, Step&& step) const {
  F8_TRY(check(call, workspace));
  if (call.m == 0) {  // the gradient of the weight of an empty batch is zero
    if (call.dw == nullptr || call.accumulate) return {};
    return step("clear dw", 0.0, [this, dw = call.dw](Stream stream) {
      return zero(*driver, primary, dw, dw_bytes(), stream);
    });
  }
  if (call.dx == nullptr && call.dw == nullptr) return {};
  auto* work = static_cast<uint8_t*>(workspace);
  const auto* saved = static_cast<const uint8_t*>(call.saved);
  // A gradient in high precision reads dy itself.
  const bool q = call.dx != nullptr && is_fp8(Gemm::kGradInput);
  const bool qt = call.dw != nullptr && is_fp8(Gemm::kGradWeight);

  std::array<Place, 3> places;
  Place& dy = places[static_cast<size_t>(Tensor::kGradOutput)];
  dy = {.x = call.dy, .rows = call.m, .cols = desc.shape.n};
  dy.q = work + layout.dy.q;
  dy.qt = work + layout.dy.qt;
  dy.q_scale = reinterpret_cast<float*>(work + layout.dy.q_scale);
  dy.qt_scale = reinterpret_cast<float*>(work + layout.dy.qt_scale);
  dy.partials = reinterpret_cast<uint32_t*>(work + layout.dy_partials);
  dy.words = reinterpret_cast<uint32_t*>(work + layout.words);
  dy.word = layout.dy_words;
  if (q || qt) {
    const Work what = q && qt ? Work::kGradOutput
                      : q     ? Work::kGradOutputForInput
                              : Work::kGradOutputForWeight;
    F8_TRY(quantize(what, call.first_step, places, call.scales, dy.words,
                    layout.dy_words.row + call.m, step));
  }
  uint8_t* scratch = work + layout.backward_gemm;
  GemmCall input{.a = call.dy, .b = call.w, .d = call.dx, .m = call.m};
  if (q) {
    const auto* base =
        call.weight_cache != nullptr ? static_cast<const uint8_t*>(call.weight_cache) : saved;
    const CopyLayout& at = call.weight_cache != nullptr ? layout.cache : layout.w;
    input.a = dy.q;
    input.b = base + at.qt;
    input.inv_scale_a = inverse_q(Tensor::kGradOutput, dy, qt);
    input.inv_scale_b = inverse_of(*kernels.of(Tensor::kWeight).qt,
                                   reinterpret_cast<const float*>(base + at.qt_scale));
  }
  GemmCall weight{.a = call.dy, .b = call.x, .d = call.dw, .m = call.m};
  if (qt) {
    weight.a = dy.qt;
    weight.b = saved + layout.x.qt;
    weight.inv_scale_a = inverse_qt(Tensor::kGradOutput, dy);
    weight.inv_scale_b = inverse_of(*kernels.of(Tensor::kInput).qt,
                                    reinterpret_cast<const float*>(saved + layout.x.qt_scale));
  }
  if (call.dx != nullptr && call.dw != nullptr && !call.accumulate && gradients != nullptr) {
    return step("gemm gradients", 0.0, [this, input, weight](Stream stream) {
      return gradients->run(input, weight, stream);
    });
  }
  if (call.dx != nullptr) {
    F8_TRY(step("gemm grad_input", 0.0, [this, input, scratch](Stream stream) {
      return gemm(Gemm::kGradInput).run(input, scratch, stream);
    }));
  }
  if (call.dw == nullptr) return {};
  const GemmPlan& product = call.accumulate ? *add_grad_weight : gemm(Gemm::kGradWeight);
  return step("gemm grad_weight", 0.0, [&product, weight, scratch](Stream stream) {
    return product.run(weight, scratch, stream);
  });
}

template <class Step>
Status Linear::State::cast_weight(const WeightCall& call, void* workspace, Step&& step) const {
  if (layout.cache_bytes == 0) return {};
  F8_TRY(check(call, workspace));
  std::array<Place, 3> places;
  Place& w = places[static_cast<size_t>(Tensor::kWeight)];
  w = cached_weight(call.w, call.cache, static_cast<uint8_t*>(workspace));
  return quantize(Work::kWeight, call.first_step, places, call.scales, w.words, layout.input_words,
                  step);
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

  const auto load = [&](const std::array<Quantization, kWorks>& works,
                        State::Loaded& out) -> Status {
    for (size_t i = 0; i < kWorks; ++i) {
      for (const QuantizePass& pass : works[i]) {
        State::LoadedPass ready;
        if (pass.amax) ready.amax = F8_TRY(context->kernel(*pass.amax));
        ready.cast = F8_TRY(context->kernel(pass.cast));
        out[i].push_back(ready);
      }
    }
    return {};
  };
  const LinearKernels& kernels = state->kernels;
  F8_TRY(load(kernels.works, state->loaded));
  F8_TRY(load(kernels.first_works, state->first_loaded));
  const auto plan_gemm = [&](const std::optional<GemmDesc>& gemm, GemmPlanPtr& out) -> Status {
    if (!gemm) return {};
    const auto& fixed = desc.choices[static_cast<size_t>(gemm->gemm)];
    const GemmChoice choice =
        fixed ? *fixed : F8_TRY(choose_gemm(table.get(), *gemm, state->sm_count));
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
const LinearDesc& Linear::desc() const {
  return state_->desc;
}
const GemmChoice& Linear::choice(Gemm gemm) const {
  static const GemmChoice none;  // of a gradient that is not wanted
  const GemmPlanPtr& plan = state_->gemms[static_cast<size_t>(gemm)];
  return plan == nullptr ? none : plan->choice();
}

namespace {

// Launches at once.
auto launch_on(Stream stream) {
  return [stream](const char*, double, const auto& launch) { return launch(stream); };
}

}  // namespace

Status Linear::forward(const ForwardCall& call, void* workspace, Stream stream) const {
  const ScopedContext current(*state_->driver, state_->primary);
  F8_TRY(current.status());
  return state_->forward(call, workspace, launch_on(stream));
}

Status Linear::backward(const BackwardCall& call, void* workspace, Stream stream) const {
  const ScopedContext current(*state_->driver, state_->primary);
  F8_TRY(current.status());
  return state_->backward(call, workspace, launch_on(stream));
}

Status Linear::cast_weight(const WeightCall& call, void* workspace, Stream stream) const {
  const ScopedContext current(*state_->driver, state_->primary);
  F8_TRY(current.status());
  return state_->cast_weight(call, workspace, launch_on(stream));
}

namespace {

// Keeps launches as steps; a call that cannot run becomes one step that says why.
template <class Sequence>
std::vector<Step> collect(const Driver& driver, CUcontext primary, const char* name,
                          Sequence&& sequence) {
  std::vector<Step> steps;
  const Status status = sequence([&](const char* step, double bytes, auto&& launch) -> Status {
    steps.push_back({step,
                     [&driver, primary, launch](Stream stream) -> Status {
                       const ScopedContext current(driver, primary);
                       F8_TRY(current.status());
                       return launch(stream);
                     },
                     bytes});
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

std::vector<Step> Linear::cast_weight_steps(const WeightCall& call, void* workspace) const {
  return collect(*state_->driver, state_->primary, "cast_weight",
                 [&](auto&& keep) { return state_->cast_weight(call, workspace, keep); });
}

}  // namespace f8::runtime
