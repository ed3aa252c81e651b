// A linear's tensors for one call in host memory, and a plan for them on the fake device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recipes/reference/reference.hpp"
#include "runtime/linear/linear.hpp"
#include "tests/call_args.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"
#include "tests/weight_of.hpp"

namespace f8::runtime::testing {

using reference::Matrix;

inline constexpr uint8_t kPoison = 0xff;
inline constexpr size_t kGuard = 4096;  // a tensor put at another's end reaches no third one

// 16-byte aligned bytes, poisoned, with a guard behind them.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes), data_(bytes + kGuard + 16, kPoison) {}
  explicit Buffer(const Matrix& x, Dtype type = Dtype::kBf16, int64_t gap = 0)
      : Buffer(reference::to_bytes(x, type, x.cols + gap, kPoison)) {}
  explicit Buffer(const std::vector<uint8_t>& bytes) : Buffer(bytes.size()) {
    std::ranges::copy(bytes, data());
  }
  [[nodiscard]] uint8_t* data() {
    return data_.data() + (16 - reinterpret_cast<uintptr_t>(data_.data()) % 16) % 16;
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }
  [[nodiscard]] bool guard_is_whole() {
    return std::all_of(data() + bytes_, data() + bytes_ + kGuard - 16,
                       [](uint8_t b) { return b == kPoison; });
  }
  [[nodiscard]] bool untouched() {
    return std::all_of(data(), data() + bytes_, [](uint8_t b) { return b == kPoison; });
  }
  [[nodiscard]] std::vector<double> bf16() {
    std::vector<double> out(bytes_ / 2);
    const auto* bits = reinterpret_cast<const uint16_t*>(data());
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<double>(decode_bf16(bits[i]));
    return out;
  }
  [[nodiscard]] std::vector<double> f32() {
    const auto* values = reinterpret_cast<const float*>(data());
    return {values, values + bytes_ / 4};
  }

 private:
  size_t bytes_;
  std::vector<uint8_t> data_;
};

[[nodiscard]] inline std::vector<uint8_t> bytes(Buffer& buffer) {
  return {buffer.data(), buffer.data() + buffer.bytes()};
}

// Tensors of one call and a plan for them, their rows `gap` elements more apart than long. Where
// the recipe has delayed scaling there is a state, and calls start as a first step does.
struct Fixture {
  Fixture(FakeCuda& cuda, const LinearDesc& desc, int64_t m_of_call, uint64_t seed = 1,
          int64_t gap_of_rows = 0)
      : context(cuda.context()),
        linear(Linear::plan(context, desc).value()),
        m(m_of_call),
        gap(gap_of_rows),
        type(desc.tensor_dtype),
        xm(random(m, desc.shape.k, seed, reference::Distribution::kOutliers)),
        wm(random(desc.shape.n, desc.shape.k, seed + 1)),
        dym(random(m, desc.shape.n, seed + 2)),
        biasm(random(1, desc.shape.n, seed + 3)),
        x(xm, type, gap),
        w(wm, type, gap),
        dy(dym, type, gap),
        bias(biasm, type),
        y(bytes(m, desc.shape.n, type)),
        dx(bytes(m, desc.shape.k, type)),
        dw(bytes(desc.shape.n, desc.shape.k, desc.grad_weight_dtype)),
        workspace(linear->workspace_bytes()),
        saved(linear->saved_bytes()),
        state(0) {
    if (linear->scale_slots().empty()) return;
    delayed = DelayedScales::plan(context, linear->scale_slots()).value();
    state = Buffer(delayed->bytes());
    EXPECT_TRUE(delayed->init(state.data(), nullptr));
    slots = delayed->slots(state.data(), 0);
  }

  [[nodiscard]] ForwardCall forward() {
    return {.m = m,
            .x = {x.data(), ld(linear->desc().shape.k)},
            .w = {w.data(), ld(linear->desc().shape.k)},
            .bias = linear->desc().bias ? bias.data() : nullptr,
            .y = {y.data(), ld(linear->desc().shape.n)},
            .saved = {saved.data()},
            .workspace = {workspace.data()},
            .step = first_step_if(first_step),
            .scales = slots};
  }
  [[nodiscard]] BackwardCall backward() {
    return {
        .m = m,
        .dy = {dy.data(), ld(linear->desc().shape.n)},
        .x = {x.data(), ld(linear->desc().shape.k)},
        .w = {w.data(), ld(linear->desc().shape.k)},
        .dx = {linear->desc().needs_grad_input ? dx.data() : nullptr, ld(linear->desc().shape.k)},
        .dw = {linear->desc().needs_grad_weight ? dw.data() : nullptr, ld(linear->desc().shape.k)},
        .saved = {saved.data()},
        .workspace = {workspace.data()},
        .step = first_step_if(first_step),
        .scales = slots};
  }
  [[nodiscard]] reference::LinearResult expected(const reference::DelayedAmax& amax = {}) const {
    return reference::linear(linear->desc().recipe, xm, wm, dym, amax).value();
  }
  // A result's values; what lies between its rows must be as it was.
  [[nodiscard]] std::vector<double> values(Buffer& buffer, int64_t cols, Dtype of) const {
    const auto stride = static_cast<size_t>(cols + gap) * size_bytes(of);
    std::vector<double> out;
    for (size_t at = 0; at < buffer.bytes(); at += stride) {
      const uint8_t* row = buffer.data() + at;
      for (int64_t c = 0; c < cols; ++c) {
        out.push_back(static_cast<double>(load_element(row, c, of)));
      }
      EXPECT_TRUE(std::all_of(row + static_cast<size_t>(cols) * size_bytes(of), row + stride,
                              [](uint8_t b) { return b == kPoison; }));
    }
    return out;
  }
  [[nodiscard]] std::vector<double> values_y() { return values(y, linear->desc().shape.n, type); }
  [[nodiscard]] std::vector<double> values_dx() { return values(dx, linear->desc().shape.k, type); }
  [[nodiscard]] std::vector<double> values_dw() {
    return values(dw, linear->desc().shape.k, linear->desc().grad_weight_dtype);
  }
  [[nodiscard]] std::vector<double> result_dw() {
    return linear->desc().grad_weight_dtype == Dtype::kF32 ? dw.f32() : dw.bf16();
  }
  [[nodiscard]] bool guards_are_whole() {
    const auto buffers = {&y, &dx, &dw, &workspace, &saved, &state};
    return std::ranges::all_of(buffers, [](Buffer* buffer) { return buffer->guard_is_whole(); });
  }

  std::shared_ptr<Context> context;
  std::shared_ptr<const Linear> linear;
  int64_t m, gap;
  Dtype type;
  Matrix xm, wm, dym, biasm;
  Buffer x, w, dy, bias, y, dx, dw, workspace, saved, state;
  std::optional<DelayedScales> delayed;
  ScaleSlots slots;
  bool first_step = true;

 private:
  [[nodiscard]] Matrix random(
      int64_t rows, int64_t cols, uint64_t seed,
      reference::Distribution distribution = reference::Distribution::kNormal) const {
    return reference::rounded_to(reference::random_matrix(rows, cols, seed, distribution), type);
  }
  [[nodiscard]] size_t bytes(int64_t rows, int64_t cols, Dtype of) const {
    return static_cast<size_t>(rows * (cols + gap)) * size_bytes(of);
  }
  [[nodiscard]] int64_t ld(int64_t cols) const { return gap == 0 ? 0 : cols + gap; }
};

// A fixture's weight in fp8, for calls with w_tensor.
struct Fp8Weight {
  explicit Fp8Weight(Fixture& fixture) : Fp8Weight(fixture, weight_of(fixture.linear->desc())) {}
  Fp8Weight(Fixture& fixture, const QuantizerDesc& desc)
      : s(fixture),
        quantizer(Quantizer::plan(s.context, desc).value()),
        tensor(quantizer->tensor_bytes()),
        workspace(quantizer->workspace_bytes()),
        view(quantizer->view(tensor.data(), nullptr, desc.rows).value()) {}

  [[nodiscard]] QuantizeCall call() {
    return {.rows = view.rows,
            .x = {s.w.data(), s.forward().w.ld},
            .tensor = {tensor.data()},
            .step = first_step_if(s.first_step),
            .scales = s.slots};
  }
  [[nodiscard]] Status run(const QuantizeCall& of) {
    return quantizer->run(with_workspace(of, workspace.data()), nullptr);
  }
  [[nodiscard]] Status run() { return run(call()); }

  Fixture& s;
  std::shared_ptr<const Quantizer> quantizer;
  Buffer tensor, workspace;
  float8_tensor view;
};

// Runs both calls of a step, between which others write the workspace.
inline void run_step(Fixture& s) {
  const auto forward = s.linear->forward(s.forward(), nullptr);
  ASSERT_TRUE(forward) << forward.error().message;
  std::memset(s.workspace.data(), kPoison, s.linear->workspace_bytes());
  const auto backward = s.linear->backward(s.backward(), nullptr);
  ASSERT_TRUE(backward) << backward.error().message;
}

// The part of a scale state that a call reads and raises, with scales that are known.
struct Slots {
  alignas(16) float scale[24] = {};
  uint32_t amax[4] = {};
  uint32_t format[4] = {};
  Slots() {
    for (float* at = scale; at < scale + 24; at += 8) at[0] = 0.37F, at[4] = 1 / 0.37F;
  }
  operator float8_scale_slots() { return ScaleSlots{amax, scale, format}; }  // NOLINT
  [[nodiscard]] uint32_t most() const { return *std::max_element(amax, amax + 4); }
};

[[nodiscard]] inline LinearDesc describe(const char* recipe, Shape shape) {
  LinearDesc desc;
  desc.shape = shape;
  desc.recipe = find_recipe(recipe).value();
  return desc;
}

}  // namespace f8::runtime::testing
