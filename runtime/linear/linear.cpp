// The linear's forward and backward. Each is written once, as a sequence of named launches: run
// calls them in turn, and measuring keeps them as steps. Nothing on the way of a call allocates,
// locks or formats, errors excepted.
#include "runtime/linear/linear.hpp"

#include <limits>

#include "runtime/gemm/provider.hpp"
#include "runtime/linear/casts.hpp"
#include "runtime/quantize/bias_grad.hpp"

namespace f8::runtime {

Place Linear::State::input_place(const ForwardCall& call, uint8_t* work, uint8_t* saved) const {
  Place place{.x = call.x, .rows = call.m, .cols = desc.shape.k, .ld = call.ld_x};
  place.q = work + layout.x.q;
  place.q_scale = reinterpret_cast<float*>(work + layout.x.q_scale);
  place.partials = reinterpret_cast<uint32_t*>(work + layout.x_partials);
  place.lines = reinterpret_cast<uint16_t*>(work + layout.x_lines);
  place.words = reinterpret_cast<uint32_t*>(work + layout.words);
  place.word = layout.x_words;
  if (saved != nullptr) {
    place.qt = saved + layout.x.qt;
    place.qt_scale = reinterpret_cast<float*>(saved + layout.x.qt_scale);
  }
  return place;
}

Place Linear::State::weight_place(const void* w, int64_t ld, uint8_t* work) const {
  Place place{.x = w, .rows = desc.shape.n, .cols = desc.shape.k, .ld = ld};
  place.partials = reinterpret_cast<uint32_t*>(work + layout.w_partials);
  place.lines = reinterpret_cast<uint16_t*>(work + layout.w_lines);
  place.words = reinterpret_cast<uint32_t*>(work + layout.words);
  place.word = layout.w_words;
  return place;
}

Place Linear::State::cached_weight(const void* w, int64_t ld, const void* cache,
                                   uint8_t* work) const {
  Place place = weight_place(w, ld, work);
  auto* at = static_cast<uint8_t*>(const_cast<void*>(cache));
  place.q = at + layout.cache.q;
  place.qt = at + layout.cache.qt;
  place.q_scale = reinterpret_cast<float*>(at + layout.cache.q_scale);
  place.qt_scale = reinterpret_cast<float*>(at + layout.cache.qt_scale);
  return place;
}

Place Linear::State::place_again(const Place& tensor, const LinearLayout::Again& at,
                                 const CopyLayout& copy, uint8_t* work) const {
  Place place = tensor;
  place.qt = work + copy.qt;
  place.qt_scale = reinterpret_cast<float*>(work + copy.qt_scale);
  place.partials = reinterpret_cast<uint32_t*>(work + at.partials);
  place.lines = reinterpret_cast<uint16_t*>(work + at.lines);
  place.words = reinterpret_cast<uint32_t*>(work + layout.words);
  place.word = at.words;
  return place;
}

template <class Step>
Status Linear::State::bias_gradient(const BackwardCall& call, const float* sums, bool summed,
                                    Step&& step) const {
  if (!summed) {
    const auto args =
        column_sums_args(call.dy, call.ld_dy, call.m, desc.shape.n, const_cast<float*>(sums));
    const double elements = static_cast<double>(call.m) * static_cast<double>(desc.shape.n);
    F8_TRY(step("sum dy", cast_bytes({.in = desc.tensor_dtype, .q = false, .qt = false}, elements),
                [this, args](Stream stream) {
                  return launch_column_sums(*driver, *column_sums, args, programmatic, stream);
                }));
  }
  const auto args = bias_grad_args(sums, call.m, desc.shape.n, call.db, call.accumulate_bias);
  return step("bias gradient", 0.0, [this, args](Stream stream) {
    return launch_bias_grad(*driver, *bias_grad, args, programmatic, stream);
  });
}

template <class Step>
Status Linear::State::forward(const ForwardCall& call, void* workspace, Step&& step) const {
  F8_TRY(check(call, workspace));
  if (call.m == 0) return {};
  auto* work = static_cast<uint8_t*>(workspace);
  auto* saved = desc.recompute ? nullptr : static_cast<uint8_t*>(call.saved);
  const bool training = saved != nullptr;
  const bool cached = call.weight_cache != nullptr;

  std::array<Place, 3> places;
  Place& x = places[static_cast<size_t>(Tensor::kInput)];
  Place& w = places[static_cast<size_t>(Tensor::kWeight)];
  x = input_place(call, work, saved);
  if (cached) {
    w = cached_weight(call.w, call.ld_w, call.weight_cache, work);
  } else {
    w = weight_place(call.w, call.ld_w, work);
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
  QuantizeScratch scratch{.sync = work + layout.sync,
                          .first_word = x.words + first_word,
                          .word_count = layout.x_words.row + call.m - first_word,
                          .counters = call.counters,
                          .ranks = call.evaluate ? AmaxReduction{} : call.ranks,
                          .first = reinterpret_cast<uint32_t*>(work + layout.first)};
  ScaleSlots scales = call.scales;
  if (call.evaluate) scales.amax = nullptr;
  F8_TRY(quantize(what, call.first_step, places, scales, scratch, step));

  GemmCall gemm_call{.a = call.x, .b = call.w, .d = call.y, .m = call.m};
  gemm_call.bias = call.bias;
  gemm_call.ld_d = call.ld_y;
  if (!is_fp8(Gemm::kOutput)) {
    gemm_call.ld_a = call.ld_x;
    gemm_call.ld_b = call.ld_w;
  } else {
    gemm_call.a = x.q;
    gemm_call.b = w.q;
    gemm_call.inv_scale_a = inverse_q(Tensor::kInput, x, training);
    gemm_call.inv_scale_b = inverse_q(Tensor::kWeight, w, training || cached);
  }
  return step("gemm output", 0.0,
              [this, gemm_call, own = work + layout.forward_gemm](Stream stream) {
                return gemm(Gemm::kOutput).run(gemm_call, own, stream);
              });
}

// The gradients of the parameters of an empty batch are zero.
template <class Step>
Status Linear::State::empty_backward(const BackwardCall& call, Step&& step) const {
  if (call.dw != nullptr && !call.accumulate) {
    F8_TRY(step("clear dw", 0.0, [this, dw = call.dw, ld = call.ld_dw](Stream stream) {
      const size_t element = size_bytes(desc.grad_weight_dtype);
      const auto row = static_cast<size_t>(desc.shape.k) * element;
      const size_t pitch = ld == 0 ? row : static_cast<size_t>(ld) * element;
      return zero(*driver, primary, dw, desc.shape.n, row, pitch, stream);
    }));
  }
  if (call.db == nullptr || call.accumulate_bias) return {};
  return step("clear db", 0.0, [this, db = call.db](Stream stream) {
    const size_t row = static_cast<size_t>(desc.shape.n) * size_bytes(desc.bias_grad_dtype);
    return zero(*driver, primary, db, 1, row, row, stream);
  });
}

template <class Step>
Status Linear::State::backward(const BackwardCall& call, void* workspace, Step&& step) const {
  F8_TRY(check(call, workspace));
  if (call.m == 0) return empty_backward(call, step);
  if (call.dx == nullptr && call.dw == nullptr && call.db == nullptr) return {};
  auto* work = static_cast<uint8_t*>(workspace);
  const auto* saved = desc.recompute ? work : static_cast<const uint8_t*>(call.saved);
  const bool cached = call.weight_cache != nullptr;
  // A gradient in high precision reads dy itself.
  const bool q = call.dx != nullptr && is_fp8(Gemm::kGradInput);
  const bool qt = call.dw != nullptr && is_fp8(Gemm::kGradWeight);

  std::array<Place, 3> places;
  Place& dy = places[static_cast<size_t>(Tensor::kGradOutput)];
  dy = {.x = call.dy, .rows = call.m, .cols = desc.shape.n, .ld = call.ld_dy};
  dy.q = work + layout.dy.q;
  dy.qt = work + layout.dy.qt;
  dy.q_scale = reinterpret_cast<float*>(work + layout.dy.q_scale);
  dy.qt_scale = reinterpret_cast<float*>(work + layout.dy.qt_scale);
  dy.partials = reinterpret_cast<uint32_t*>(work + layout.dy_partials);
  dy.lines = reinterpret_cast<uint16_t*>(work + layout.dy_lines);
  dy.words = reinterpret_cast<uint32_t*>(work + layout.words);
  dy.word = layout.dy_words;
  auto* sums = reinterpret_cast<float*>(work + layout.sums);
  QuantizeScratch scratch{.sync = work + layout.sync,
                          .first_word = dy.words,  // and what is cast again
                          .word_count = layout.dy_words.row + call.m,
                          .counters = call.counters,
                          .sums = call.db != nullptr ? sums : nullptr,
                          .ranks = call.ranks,
                          .first = reinterpret_cast<uint32_t*>(work + layout.first)};
  if (q || qt) {
    const bool apart = desc.recompute && cached;
    const Work what = !q      ? Work::kGradOutputForWeight
                      : qt    ? (apart ? Work::kGradOutputCached : Work::kGradOutput)
                      : apart ? Work::kGradOutputForInputCached
                              : Work::kGradOutputForInput;
    if (desc.recompute) {
      const auto [m, n, k] = Shape{call.m, desc.shape.n, desc.shape.k};
      places[static_cast<size_t>(Tensor::kInput)] = place_again(
          {.x = call.x, .rows = m, .cols = k, .ld = call.ld_x}, layout.x_again, layout.x, work);
      places[static_cast<size_t>(Tensor::kWeight)] = place_again(
          {.x = call.w, .rows = n, .cols = k, .ld = call.ld_w}, layout.w_again, layout.w, work);
    }
    F8_TRY(quantize(what, call.first_step, places, call.scales, scratch, step));
  }
  if (call.db != nullptr) {
    F8_TRY(bias_gradient(call, sums, scratch.sums == nullptr, step));
  }
  uint8_t* own = work + layout.backward_gemm;
  GemmCall input{.a = call.dy, .b = call.w, .d = call.dx, .m = call.m};
  input.ld_d = call.ld_dx;
  if (!is_fp8(Gemm::kGradInput)) {
    input.ld_a = call.ld_dy;
    input.ld_b = call.ld_w;
  }
  if (q) {
    const auto* base = cached ? static_cast<const uint8_t*>(call.weight_cache) : saved;
    const CopyLayout& at = cached ? layout.cache : layout.w;
    input.a = dy.q;
    input.b = base + at.qt;
    input.inv_scale_a = inverse_q(Tensor::kGradOutput, dy, qt);
    input.inv_scale_b = inverse_of(*kernels.of(Tensor::kWeight).qt,
                                   reinterpret_cast<const float*>(base + at.qt_scale));
  }
  GemmCall weight{.a = call.dy, .b = call.x, .d = call.dw, .m = call.m};
  weight.ld_d = call.ld_dw;
  if (!is_fp8(Gemm::kGradWeight)) {
    weight.ld_a = call.ld_dy;
    weight.ld_b = call.ld_x;
  }
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
    F8_TRY(step("gemm grad_input", 0.0, [this, input, own](Stream stream) {
      return gemm(Gemm::kGradInput).run(input, own, stream);
    }));
  }
  if (call.dw == nullptr) return {};
  const GemmPlan& product = call.accumulate ? *add_grad_weight : gemm(Gemm::kGradWeight);
  return step("gemm grad_weight", 0.0,
              [&product, weight, own](Stream stream) { return product.run(weight, own, stream); });
}

template <class Step>
Status Linear::State::cast_weight(const WeightCall& call, void* workspace, Step&& step) const {
  if (layout.cache_bytes == 0) return {};
  F8_TRY(check(call, workspace));
  std::array<Place, 3> places;
  Place& w = places[static_cast<size_t>(Tensor::kWeight)];
  w = cached_weight(call.w, call.ld_w, call.cache, static_cast<uint8_t*>(workspace));
  auto* work = static_cast<uint8_t*>(workspace);
  QuantizeScratch scratch{.sync = work + layout.sync,
                          .first_word = w.words,
                          .word_count = layout.input_words,
                          .counters = call.counters,
                          .valid = call.valid,
                          .ranks = call.ranks,
                          .first = reinterpret_cast<uint32_t*>(work + layout.first)};
  F8_TRY(quantize(Work::kWeight, call.first_step, places, call.scales, scratch, step));
  if (call.valid == nullptr) return {};
  return step("set valid", 0.0,
              [this, valid = call.valid](Stream stream) { return set_words(valid, 1, 1, stream); });
}

namespace {

// Launches at once.
struct LaunchOn {
  static constexpr bool kInOrder = true;
  Stream stream;
  Status operator()(const char*, double, const auto& launch) const { return launch(stream); }
};

}  // namespace

Status Linear::forward(const ForwardCall& call, void* workspace, Stream stream) const {
  const ScopedContext current(*state_->driver, state_->primary);
  F8_TRY(current.status());
  F8_TRY(state_->check_device("float8_linear_forward", call, workspace, stream));
  return state_->forward(call, workspace, LaunchOn{stream});
}

Status Linear::backward(const BackwardCall& call, void* workspace, Stream stream) const {
  const ScopedContext current(*state_->driver, state_->primary);
  F8_TRY(current.status());
  F8_TRY(state_->check_device("float8_linear_backward", call, workspace, stream));
  return state_->backward(call, workspace, LaunchOn{stream});
}

Status Linear::cast_weight(const WeightCall& call, void* workspace, Stream stream) const {
  const ScopedContext current(*state_->driver, state_->primary);
  F8_TRY(current.status());
  F8_TRY(state_->check_device("float8_linear_cast_weight", call, workspace, stream));
  return state_->cast_weight(call, workspace, LaunchOn{stream});
}

namespace {

// Keeps launches as steps, each of which may run alone.
struct Keep {
  static constexpr bool kInOrder = false;
  const Driver& driver;
  CUcontext primary;
  std::vector<Step>& steps;
  Status operator()(const char* name, double bytes, const auto& launch) const {
    steps.push_back({name,
                     [&driver = driver, primary = primary, launch](Stream stream) -> Status {
                       const ScopedContext current(driver, primary);
                       F8_TRY(current.status());
                       return launch(stream);
                     },
                     bytes});
    return {};
  }
};

// A call that cannot run becomes one step that says why.
template <class Sequence>
std::vector<Step> collect(const Driver& driver, CUcontext primary, const char* name,
                          Sequence&& sequence) {
  std::vector<Step> steps;
  const Status status = sequence(Keep{driver, primary, steps});
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

Status invalidate_weights(Context& context, uint32_t* valid, size_t count, Stream stream) {
  if (valid == nullptr || !is_aligned(valid, 4)) {
    return fail(ErrorCode::kInvalidArgument, "float8_weights_invalidate: valid is {}",
                valid == nullptr ? "NULL" : "not aligned to 4 bytes");
  }
  if (count > std::numeric_limits<size_t>::max() / sizeof(uint32_t)) {
    return fail(ErrorCode::kInvalidArgument, "float8_weights_invalidate: count is {}", count);
  }
  CallMemory memory;
  memory.add("valid", valid, count * sizeof(uint32_t), Access::kWrite);
  F8_TRY(memory.check_device("float8_weights_invalidate", context, stream));
  const Driver& driver = context.state().driver;
  const ScopedContext current(driver, context.state().primary);
  F8_TRY(current.status());
  return driver.check(
      driver.memset_d32_async(reinterpret_cast<CUdeviceptr>(valid), 0, count, stream),
      "cuMemsetD32Async");
}

}  // namespace f8::runtime
