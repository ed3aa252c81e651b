// Adding up a linear's buffers.
#include "runtime/linear/layout.hpp"

#include <algorithm>

#include "runtime/device/memory.hpp"
#include "runtime/gemm/gemm.hpp"
#include "runtime/quantize/bias_grad.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {
namespace {

constexpr size_t kWord = 4;

// A tensor's matrix, and what is written of it.
struct Matrix {
  int64_t rows;
  int64_t cols;
  const Copies& copies;

  [[nodiscard]] size_t q_bytes() const { return copies.q ? fp8_copy_bytes(rows, cols) : 0; }
  [[nodiscard]] size_t qt_bytes() const { return copies.qt ? fp8_copy_bytes(cols, rows) : 0; }
  [[nodiscard]] size_t q_scale_bytes() const { return scale_bytes(copies.q, rows, cols); }
  [[nodiscard]] size_t qt_scale_bytes() const { return scale_bytes(copies.qt, cols, rows); }
  // Alone in a launch it has the most partial maxima, and a smaller m never has more.
  [[nodiscard]] size_t partials_bytes(int sm_count) const {
    const bool wanted = (copies.q && copies.q->granularity == Granularity::kTensor) ||
                        (copies.qt && copies.qt->granularity == Granularity::kTensor);
    return wanted ? kWord * static_cast<size_t>(amax_partials(rows, cols, sm_count)) : 0;
  }

 private:
  static size_t scale_bytes(const std::optional<CastSetting>& copy, int64_t rows, int64_t cols) {
    return copy ? kWord *
                      static_cast<size_t>(scale_floats(scale_mode(copy->granularity), rows, cols))
                : 0;
  }
};

// The bytes of a tensor's per-tile amax partials, the most that any pass over it leaves.
size_t lines_bytes(const std::vector<CallPasses>& calls, Tensor tensor, int64_t rows,
                   int64_t cols) {
  size_t most = 0;
  for (const auto& [when, passes] : calls) {
    for (const KernelPass& pass : passes) {
      if (!pass.amax || std::ranges::count(pass.casts, tensor, &FusedCast::tensor) == 0) continue;
      most = std::max(most, line_bytes(*pass.amax, rows, cols));
    }
  }
  return most;
}

bool may_raise_words(const std::vector<CallPasses>& calls) {
  return std::ranges::any_of(calls, [](const CallPasses& call) {
    return std::ranges::any_of(call.passes, [](const KernelPass& pass) {
      return pass.amax && (pass.amax->row || pass.amax->col);
    });
  });
}

}  // namespace

LinearLayout linear_layout(Shape shape, const LinearKernels& kernels, int sm_count,
                           size_t gemm_forward, size_t gemm_backward) {
  const auto [m, n, k] = shape;
  const Matrix x{m, k, kernels.of(Tensor::kInput)};
  const Matrix w{n, k, kernels.of(Tensor::kWeight)};
  const Matrix dy{m, n, kernels.of(Tensor::kGradOutput)};
  constexpr int64_t kOne = WordLayout::kTensorWords;

  LinearLayout layout;
  layout.w_words = {.row = 0, .column = n, .tensor = n + k};
  layout.input_words = n + k + kOne;
  layout.x_words = {.row = layout.input_words + k + kOne,
                    .column = layout.input_words,
                    .tensor = layout.input_words + k};
  const int64_t again = kernels.recompute ? 2 * (k + kOne) : 0;
  layout.w_again.words = {.row = 0, .column = 0, .tensor = k};
  layout.x_again.words = {.row = 0, .column = k + kOne, .tensor = 2 * k + kOne};
  layout.dy_words = {.row = again + n + kOne, .column = again, .tensor = again + n};
  const std::vector<CallPasses> calls = all_passes(kernels);
  const bool words = may_raise_words(calls);
  const auto words_bytes = [&](int64_t count) {
    return words ? kWord * static_cast<size_t>(count) : 0;
  };

  Arena forward;
  layout.sync = forward.take(quantize_sync_bytes(sm_count));
  const size_t first_bytes = kWord * kFirstWords * kernels.slots.size();
  layout.first = forward.take(first_bytes);
  layout.words = forward.take(words_bytes(layout.x_words.row + m));
  layout.x_lines = forward.take(lines_bytes(calls, Tensor::kInput, m, k));
  layout.w_lines = forward.take(lines_bytes(calls, Tensor::kWeight, n, k));
  layout.x_partials = forward.take(x.partials_bytes(sm_count));
  layout.w_partials = forward.take(w.partials_bytes(sm_count));
  layout.x.q = forward.take(x.q_bytes());
  layout.w.q = forward.take(w.q_bytes());
  layout.x.q_scale = forward.take(x.q_scale_bytes());
  layout.w.q_scale = forward.take(w.q_scale_bytes());
  layout.forward_gemm = forward.take(gemm_forward);

  Arena saved;
  const auto take_transposed = [](Arena& arena, const Matrix& matrix, CopyLayout& at) {
    at.qt = arena.take(matrix.qt_bytes());
    at.qt_scale = arena.take(matrix.qt_scale_bytes());
  };
  if (!kernels.recompute) {
    take_transposed(saved, x, layout.x);
    layout.saved_input_bytes = saved.size();
    take_transposed(saved, w, layout.w);
    layout.saved_bytes = saved.size();
  }

  Arena cache;
  layout.cache.q = cache.take(w.q_bytes());
  layout.cache.qt = cache.take(w.qt_bytes());
  layout.cache.q_scale = cache.take(w.q_scale_bytes());
  layout.cache.qt_scale = cache.take(w.qt_scale_bytes());
  layout.cache_bytes = cache.size();

  Arena backward;
  (void)backward.take(quantize_sync_bytes(sm_count));
  (void)backward.take(first_bytes);
  (void)backward.take(words_bytes(layout.dy_words.row + m));
  layout.dy_lines = backward.take(lines_bytes(calls, Tensor::kGradOutput, m, n));
  layout.dy_partials = backward.take(dy.partials_bytes(sm_count));
  layout.dy.q = backward.take(dy.q_bytes());
  layout.dy.qt = backward.take(dy.qt_bytes());
  layout.dy.q_scale = backward.take(dy.q_scale_bytes());
  layout.dy.qt_scale = backward.take(dy.qt_scale_bytes());
  if (kernels.recompute) {
    layout.x_again.lines = backward.take(lines_bytes(calls, Tensor::kInput, m, k));
    layout.w_again.lines = backward.take(lines_bytes(calls, Tensor::kWeight, n, k));
    layout.x_again.partials = backward.take(x.partials_bytes(sm_count));
    layout.w_again.partials = backward.take(w.partials_bytes(sm_count));
    take_transposed(backward, x, layout.x);
    take_transposed(backward, w, layout.w);
  }
  if (kernels.bias_grad) layout.sums = backward.take(column_sums_bytes(m, n));
  layout.backward_gemm = backward.take(gemm_backward);

  layout.workspace_bytes = std::max(forward.size(), backward.size());
  return layout;
}

}  // namespace f8::runtime
