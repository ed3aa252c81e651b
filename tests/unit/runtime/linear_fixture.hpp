// A linear's tensors for one call in host memory, and a plan for them on the fake device.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recipes/reference.hpp"
#include "runtime/linear.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"

namespace f8::runtime::testing {

using reference::Matrix;

inline constexpr uint8_t kPoison = 0xff;
inline constexpr size_t kGuard = 64;

[[nodiscard]] inline bool says(const Error& error, std::string_view part) {
  return error.message.find(part) != std::string::npos;
}

// 16-byte aligned bytes, poisoned, with a guard behind them.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes), data_(bytes + kGuard + 16, kPoison) {}
  explicit Buffer(const Matrix& x) : Buffer(x.values.size() * 2) {
    const auto bits = reference::to_bf16_bits(x);
    std::copy_n(reinterpret_cast<const uint8_t*>(bits.data()), bytes_, data());
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

// Tensors of one call and a plan for them. Where the recipe has delayed scaling there is a state,
// and calls start as a first step does.
struct Fixture {
  Fixture(FakeCuda& cuda, const LinearDesc& desc, int64_t m_of_call, uint64_t seed = 1)
      : context(cuda.context()),
        linear(Linear::plan(context, desc).value()),
        m(m_of_call),
        xm(reference::random_matrix(m, desc.shape.k, seed, reference::Distribution::kOutliers)),
        wm(reference::random_matrix(desc.shape.n, desc.shape.k, seed + 1)),
        dym(reference::random_matrix(m, desc.shape.n, seed + 2)),
        biasm(reference::random_matrix(1, desc.shape.n, seed + 3)),
        x(xm),
        w(wm),
        dy(dym),
        bias(biasm),
        y(static_cast<size_t>(m * desc.shape.n * 2)),
        dx(static_cast<size_t>(m * desc.shape.k * 2)),
        dw(static_cast<size_t>(desc.shape.n * desc.shape.k) * size_bytes(desc.grad_weight_dtype)),
        workspace(linear->workspace_bytes()),
        saved(linear->saved_bytes()),
        cache(linear->weight_cache_bytes()),
        state(0) {
    if (linear->scale_slots().empty()) return;
    delayed = DelayedScales::plan(context, linear->scale_slots()).value();
    state = Buffer(delayed->bytes());
    EXPECT_TRUE(delayed->init(state.data(), nullptr));
    slots = delayed->slots(state.data(), 0);
  }

  [[nodiscard]] ForwardCall forward() {
    return {.x = x.data(),
            .w = w.data(),
            .y = y.data(),
            .saved = saved.data(),
            .m = m,
            .bias = linear->desc().bias ? bias.data() : nullptr,
            .scales = slots,
            .first_step = first_step};
  }
  [[nodiscard]] BackwardCall backward() {
    return {.dy = dy.data(),
            .saved = saved.data(),
            .dx = linear->desc().needs_grad_input ? dx.data() : nullptr,
            .dw = dw.data(),
            .m = m,
            .x = x.data(),
            .w = w.data(),
            .scales = slots,
            .first_step = first_step};
  }
  [[nodiscard]] WeightCall weight() {
    return {.w = w.data(), .cache = cache.data(), .scales = slots, .first_step = first_step};
  }
  [[nodiscard]] reference::LinearResult expected(const reference::DelayedAmax& amax = {}) const {
    return reference::linear(linear->desc().recipe, xm, wm, dym, amax).value();
  }
  [[nodiscard]] std::vector<double> result_dw() {
    return linear->desc().grad_weight_dtype == Dtype::kF32 ? dw.f32() : dw.bf16();
  }
  [[nodiscard]] bool guards_are_whole() {
    const auto buffers = {&y, &dx, &dw, &workspace, &saved, &cache, &state};
    return std::ranges::all_of(buffers, [](Buffer* buffer) { return buffer->guard_is_whole(); });
  }

  std::shared_ptr<Context> context;
  std::shared_ptr<const Linear> linear;
  int64_t m;
  Matrix xm, wm, dym, biasm;
  Buffer x, w, dy, bias, y, dx, dw, workspace, saved, cache, state;
  std::optional<DelayedScales> delayed;
  ScaleSlots slots;
  bool first_step = true;
};

[[nodiscard]] inline LinearDesc describe(const char* recipe, Shape shape) {
  LinearDesc desc;
  desc.shape = shape;
  desc.recipe = find_recipe(recipe).value();
  return desc;
}

}  // namespace f8::runtime::testing
