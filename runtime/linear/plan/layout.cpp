// Adding up a linear's buffers.
#include "runtime/linear/plan/layout.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/device/memory.hpp"
#include "runtime/gemm/gemm.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "runtime/quantize/bias_grad.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {
namespace {

constexpr size_t kWord = 4;

// The bytes of a tensor's per-tile amax partials, the most that any pass over it leaves.
size_t most_tile_amax_bytes(const std::vector<CallPasses>& calls, Tensor tensor, int64_t rows,
                            int64_t cols) {
  size_t most = 0;
  for (const auto& [when, passes] : calls) {
    for (const KernelPass& pass : passes) {
      if (!pass.amax || std::ranges::count(pass.casts, tensor, &FusedCast::tensor) == 0) continue;
      most = std::max(most, tile_amax_bytes(*pass.amax, rows, cols));
    }
  }
  return most;
}

bool may_raise_amax(const std::vector<CallPasses>& calls) {
  return std::ranges::any_of(calls, [](const CallPasses& call) {
    return std::ranges::any_of(call.passes, [](const KernelPass& pass) {
      return pass.amax && (pass.amax->row || pass.amax->col);
    });
  });
}

// Hands out parts of a buffer of the call, with what a linear's tensors need there.
class Buffer {
 public:
  // The parts begin `begin` bytes behind the start of the call's buffer.
  Buffer(Slot slot, const LinearKernels& kernels, const std::vector<CallPasses>& calls, Shape shape,
         size_t begin = 0)
      : slot_(slot), kernels_(kernels), calls_(calls), m_(shape.m) {
    arena_.take(begin);
  }

  Ref take(size_t bytes) { return {slot_, arena_.take(bytes)}; }
  [[nodiscard]] Ref end() const { return {slot_, arena_.size()}; }
  [[nodiscard]] size_t size() const { return arena_.size(); }

  // Alone in a launch a tensor has the most partial maxima, and a smaller m never has more.
  void take_partial_maxima(Tensor tensor, TensorBuffers& at, int sm_count) {
    at.tile_amax = take(most_tile_amax_bytes(calls_, tensor, rows(at), at.cols));
    const auto wanted = [](const std::optional<CastSetting>& copy) {
      return copy && copy->granularity == Granularity::kTensor;
    };
    const Copies& copies = kernels_.of(tensor);
    at.partials = take(wanted(copies.q) || wanted(copies.qt)
                           ? kWord * static_cast<size_t>(amax_partials(rows(at), at.cols, sm_count))
                           : 0);
  }
  // `whole_rows` as in quantizer_layout.
  void take_q(Tensor tensor, TensorBuffers& at, int64_t whole_rows = 0) {
    const auto& copy = kernels_.of(tensor).q;
    at.q = take_elements(copy, rows(at), at.cols);
    at.q_scale = take_scales(copy, scale_rows(copy, at, whole_rows), at.cols);
  }
  void take_q_scale(Tensor tensor, TensorBuffers& at) {
    at.q_scale = take_scales(kernels_.of(tensor).q, rows(at), at.cols);
  }
  void take_kept_scale(Tensor tensor, TensorBuffers& at) {
    if (!kernels_.keeps_scale(tensor)) return;
    at.kept_scale = take_scales(kernels_.of(tensor).q, rows(at), at.cols);
  }
  void take_qt(Tensor tensor, TensorBuffers& at, int64_t whole_rows = 0) {
    const auto& copy = kernels_.of(tensor).qt;
    at.qt = take_elements(copy, at.cols, rows(at));
    at.qt_scale = take_scales(copy, at.cols, scale_rows(copy, at, whole_rows));
  }

  // The copies of a tensor that a call casts, about how many elements they have, and what takes them.
  struct TensorCopies {
    Tensor tensor;
    int64_t elements;
    std::function<void()> take;
  };
  // Takes them, the largest last.
  WorkspaceBytes take_copies(std::vector<TensorCopies> copies) {
    std::ranges::stable_sort(copies, {}, &TensorCopies::elements);
    WorkspaceBytes bytes{.without_copies = size()};
    for (const TensorCopies& each : copies) {
      each.take();
      bytes.end[static_cast<size_t>(each.tensor)] = size();
    }
    return bytes;
  }

 private:
  [[nodiscard]] int64_t rows(const TensorBuffers& at) const { return at.rows == 0 ? m_ : at.rows; }
  [[nodiscard]] int64_t scale_rows(const std::optional<CastSetting>& copy, const TensorBuffers& at,
                                   int64_t whole_rows) const {
    const bool of_whole = whole_rows > 0 && copy && copy->granularity == Granularity::kBlock128x128;
    return of_whole ? whole_rows : rows(at);
  }
  Ref take_elements(const std::optional<CastSetting>& copy, int64_t rows, int64_t cols) {
    return take(copy ? fp8_copy_bytes(rows, cols) : 0);
  }
  Ref take_scales(const std::optional<CastSetting>& copy, int64_t rows, int64_t cols) {
    const int64_t scales = copy ? scale_floats(copy->granularity, rows, cols) : 0;
    return take(kWord * static_cast<size_t>(scales));
  }

  Slot slot_;
  Arena arena_;
  const LinearKernels& kernels_;
  const std::vector<CallPasses>& calls_;
  int64_t m_;
};

}  // namespace

Fp8Refs fp8_refs(const Copies& copies, const TensorBuffers& at, bool with_qt) {
  const auto inverse = [](const std::optional<CastSetting>& copy, Ref scale) {
    if (!copy) return Ref();
    return copy->granularity == Granularity::kTensor ? word_at(scale, kernels::kInverse) : scale;
  };
  const Ref q_scale = with_qt && copies.share_scale() ? at.qt_scale : at.q_scale;
  return {.q = at.q,
          .q_inverse = inverse(copies.q, q_scale),
          .qt = at.qt,
          .qt_inverse = inverse(copies.qt, at.qt_scale)};
}

QuantizerLayout quantizer_layout(Shape shape, const LinearKernels& kernels, int sm_count,
                                 Tensor tensor, bool with_qt, int64_t whole_rows,
                                 bool scale_apart) {
  const auto [m, n, k] = shape;
  const std::vector<CallPasses> calls = all_passes(kernels);
  QuantizerLayout layout;
  layout.tensors = {.x = {.x = Slot::kX, .cols = k},
                    .w = {.x = Slot::kX, .rows = n, .cols = k},
                    .dy = {.x = Slot::kX, .cols = n}};
  TensorBuffers& at = layout.tensors.of(tensor);

  Buffer workspace(Slot::kWorkspace, kernels, calls, shape);
  (void)workspace.take(quantize_sync_bytes(sm_count));
  layout.first = workspace.take(kWord * kFirstWords * kernels.slots.size());
  layout.amax = workspace.end();
  AmaxWords words(layout.amax);
  at.col_amax = words.take(at.cols);
  at.amax = words.take(AmaxWords::kTensor);
  at.row_amax = words.take(at.rows == 0 ? m : at.rows);
  (void)workspace.take(may_raise_amax(calls) ? words.bytes() : 0);
  workspace.take_partial_maxima(tensor, at, sm_count);
  layout.workspace_bytes = workspace.size();

  Buffer q(Slot::kTensor, kernels, calls, shape);
  q.take_q(tensor, at, whole_rows);
  layout.q_bytes = q.size();
  Buffer qt(Slot::kTransposed, kernels, calls, shape);
  if (with_qt) qt.take_qt(tensor, at, whole_rows);
  if (kernels.keeps_scale(tensor)) at.kept_scale = Slot::kInputScale;
  if (scale_apart) qt.take_q_scale(tensor, at);
  if (kernels.keeps_column_amax) {
    const size_t columns = kWord * static_cast<size_t>(at.cols);
    at.col_amax = with_qt ? Ref(Slot::kInputScale) : qt.take(columns);
  }
  layout.qt_bytes = qt.size();
  layout.refs = fp8_refs(kernels.of(tensor), at, with_qt);
  if (kernels.keeps_column_amax && !with_qt) layout.refs.qt_inverse = at.col_amax;
  return layout;
}

LinearLayout linear_layout(Shape shape, const LinearKernels& kernels, int sm_count,
                           size_t gemm_forward, size_t gemm_backward) {
  const auto [m, n, k] = shape;
  const std::vector<CallPasses> calls = all_passes(kernels);
  const bool raises = may_raise_amax(calls);
  LinearLayout layout;

  TensorBuffers& x = layout.forward.x = {.x = Slot::kX, .cols = k};
  TensorBuffers& w = layout.forward.w = {.x = Slot::kW, .rows = n, .cols = k};
  Buffer forward(Slot::kWorkspace, kernels, calls, shape);
  (void)forward.take(quantize_sync_bytes(sm_count));
  layout.first = forward.take(kWord * kFirstWords * kernels.slots.size());
  layout.amax = forward.end();
  AmaxWords forward_words(layout.amax);
  w.row_amax = forward_words.take(n);
  w.col_amax = forward_words.take(k);
  w.amax = forward_words.take(AmaxWords::kTensor);
  x.col_amax = forward_words.take(k);
  x.amax = forward_words.take(AmaxWords::kTensor);
  x.row_amax = forward_words.take(m);
  (void)forward.take(raises ? forward_words.bytes() : 0);
  forward.take_partial_maxima(Tensor::kInput, x, sm_count);
  forward.take_partial_maxima(Tensor::kWeight, w, sm_count);
  layout.forward_gemm = forward.take(gemm_forward);
  layout.forward_bytes =
      forward.take_copies({{Tensor::kInput, m * k, [&] { forward.take_q(Tensor::kInput, x); }},
                           {Tensor::kWeight, n * k, [&] { forward.take_q(Tensor::kWeight, w); }}});

  Buffer saved(Slot::kSaved, kernels, calls, shape);
  const auto save = [&](Tensor tensor, TensorBuffers& at) {
    kernels.recompute ? saved.take_kept_scale(tensor, at) : saved.take_qt(tensor, at);
    return saved.size();
  };
  layout.saved_input_bytes = save(Tensor::kInput, x);
  layout.saved_bytes = save(Tensor::kWeight, w);

  layout.backward = layout.forward;
  layout.backward.x.kept_scale = Slot::kInputScale;
  layout.backward.w.kept_scale = Slot::kWeightScale;
  TensorBuffers& dy = layout.backward.dy = {.x = Slot::kDy, .cols = n};
  Buffer backward(Slot::kWorkspace, kernels, calls, shape);
  (void)backward.take(layout.amax.offset());
  AmaxWords backward_words(layout.amax);
  if (kernels.recompute) {
    for (TensorBuffers* again : {&layout.backward.w, &layout.backward.x}) {
      again->col_amax = backward_words.take(k);
      again->amax = backward_words.take(AmaxWords::kTensor);
    }
  }
  dy.col_amax = backward_words.take(n);
  dy.amax = backward_words.take(AmaxWords::kTensor);
  dy.row_amax = backward_words.take(m);
  (void)backward.take(raises ? backward_words.bytes() : 0);
  backward.take_partial_maxima(Tensor::kGradOutput, dy, sm_count);
  if (kernels.recompute) {
    backward.take_partial_maxima(Tensor::kInput, layout.backward.x, sm_count);
    backward.take_partial_maxima(Tensor::kWeight, layout.backward.w, sm_count);
  }
  if (kernels.bias_grad) layout.sums = backward.take(column_sums_bytes(m, n));
  layout.backward_gemm = backward.take(gemm_backward);
  std::vector<Buffer::TensorCopies> copies = {{Tensor::kGradOutput, 2 * m * n, [&] {
                                                 backward.take_q(Tensor::kGradOutput, dy);
                                                 backward.take_qt(Tensor::kGradOutput, dy);
                                               }}};
  if (kernels.recompute) {
    copies.push_back(
        {Tensor::kInput, m * k, [&] { backward.take_qt(Tensor::kInput, layout.backward.x); }});
    copies.push_back(
        {Tensor::kWeight, n * k, [&] { backward.take_qt(Tensor::kWeight, layout.backward.w); }});
  }
  layout.backward_bytes = backward.take_copies(std::move(copies));

  for (const bool yes : {false, true}) {
    const CallTensors tensors = layout.forward_tensors(yes);
    const bool with_qt = yes && !kernels.recompute;
    layout.forward_x[yes] = fp8_refs(kernels.of(Tensor::kInput), tensors.x, with_qt);
    layout.forward_w[yes] = fp8_refs(kernels.of(Tensor::kWeight), tensors.w, with_qt);
    layout.backward_dy[yes] = fp8_refs(kernels.of(Tensor::kGradOutput), layout.backward.dy, yes);
  }
  layout.backward_x = fp8_refs(kernels.of(Tensor::kInput), layout.backward.x);
  layout.backward_w = fp8_refs(kernels.of(Tensor::kWeight), layout.backward.w);
  return layout;
}

size_t WorkspaceBytes::of(bool x, bool w, bool dy) const {
  size_t most = without_copies;
  for (const auto& [tensor, given] :
       {std::pair{Tensor::kInput, x}, {Tensor::kWeight, w}, {Tensor::kGradOutput, dy}}) {
    if (!given) most = std::max(most, end[static_cast<size_t>(tensor)]);
  }
  return most;
}

CallTensors LinearLayout::forward_tensors(bool keeps) const {
  CallTensors tensors = forward;
  for (TensorBuffers* at : {&tensors.x, &tensors.w}) {
    if (keeps && at->kept_scale.slot() != 0) at->q_scale = at->kept_scale;
  }
  return tensors;
}

Result<SavedBytes> saved_bytes_of(const LinearDesc& desc) {
  constexpr int kAnySmCount = 132;  // what is saved does not depend on it
  const LinearKernels kernels = F8_TRY(linear_kernels(desc));
  const LinearLayout layout = linear_layout(desc.shape, kernels, kAnySmCount, 0, 0);
  return SavedBytes{.x = layout.saved_bytes_of(false, true),
                    .w = layout.saved_bytes_of(true, false)};
}

}  // namespace f8::runtime
