// A linear's tensors on the device, and a plan's description by the name of its recipe.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "runtime/linear/linear.hpp"
#include "tests/call_args.hpp"
#include "tests/gpu/gpu_test.hpp"
#include "tests/weight_of.hpp"

namespace f8::runtime::gpu {

[[nodiscard]] inline LinearDesc describe(const std::string& recipe, Shape shape) {
  LinearDesc desc;
  desc.shape = shape;
  desc.recipe = find_recipe(recipe).value();
  return desc;
}

// A linear's tensors for one call. Where the recipe has delayed scaling, a state in which every
// call is a first step: its scales are the tensors' own, as the reference's are.
struct Tensors {
  Tensors(const Context& context, const Linear& linear, int64_t rows, uint64_t seed,
          reference::Distribution of_x = reference::Distribution::kOutliers)
      : m(rows),
        x(reference::random_matrix(m, linear.desc().shape.k, seed, of_x)),
        w(reference::random_matrix(linear.desc().shape.n, linear.desc().shape.k, seed + 1)),
        dy(reference::random_matrix(m, linear.desc().shape.n, seed + 2)),
        device_x(to_device(context, x)),
        device_w(to_device(context, w)),
        device_dy(to_device(context, dy)),
        bias(reference::random_matrix(1, linear.desc().shape.n, seed + 3)),
        device_bias(to_device(context, bias)),
        y(context, dy.values.size() * 2),
        dx(context, x.values.size() * 2),
        dw(context, w.values.size() * size_bytes(linear.desc().grad_weight_dtype)),
        saved(context, linear.saved_bytes()),
        workspace(context, linear.workspace_bytes()),
        amaxes(context, std::vector<uint32_t>(std::max<size_t>(linear.scale_slots().size(), 1))),
        scales(context, std::vector<float>(64, 1.0F)),
        slots{amaxes.as<uint32_t>(), scales.as<float>()},
        has_bias(linear.desc().bias) {}

  [[nodiscard]] ForwardCall forward() const {
    return {.m = m,
            .x = {device_x.as()},
            .w = {device_w.as()},
            .bias = has_bias ? device_bias.as() : nullptr,
            .y = {y.as()},
            .saved = {saved.as()},
            .workspace = {workspace.as()},
            .step = first_step_if(first_step),
            .scales = slots};
  }
  [[nodiscard]] BackwardCall backward() const {
    return {.m = m,
            .dy = {device_dy.as()},
            .x = {device_x.as()},
            .w = {device_w.as()},
            .dx = {dx.as()},
            .dw = {dw.as()},
            .saved = {saved.as()},
            .workspace = {workspace.as()},
            .step = first_step_if(first_step),
            .scales = slots};
  }
  void poison_results() {
    for (DeviceBuffer* buffer : {&y, &dx, &dw, &saved, &workspace}) buffer->poison();
  }
  void expect_whole_guards() const {
    for (const DeviceBuffer* buffer : {&y, &dx, &dw, &saved, &workspace}) {
      EXPECT_TRUE(buffer->guards_are_whole());
    }
  }

  int64_t m;
  reference::Matrix x, w, dy;
  DeviceBuffer device_x, device_w, device_dy;
  reference::Matrix bias;
  DeviceBuffer device_bias, y, dx, dw, saved, workspace, amaxes, scales;
  ScaleSlots slots;
  bool has_bias;
  bool first_step = true;
};

[[nodiscard]] inline Status run(const Linear& linear, const Tensors& t, Stream stream = nullptr,
                                CastCounters* counters = nullptr) {
  ForwardCall forward = t.forward();
  forward.counters = counters;
  F8_TRY(linear.forward(forward, stream));
  BackwardCall backward = t.backward();
  backward.counters = counters;
  return linear.backward(backward, stream);
}

// A quantizer with the buffers of one tensor.
struct Quantized {
  Quantized(const Context& context, std::shared_ptr<const Quantizer> plan)
      : quantizer(std::move(plan)),
        tensor(context, quantizer->tensor_bytes()),
        workspace(context, quantizer->workspace_bytes()) {
    tensor.poison();
    workspace.poison();
  }
  [[nodiscard]] QuantizeCall call(const DeviceBuffer& x, int64_t rows, ScaleSlots slots) const {
    return {.rows = rows,
            .x = {x.as()},
            .tensor = {tensor.as()},
            .step = &kFirstOfSteps,
            .scales = slots};
  }
  [[nodiscard]] Status run(const QuantizeCall& call, Stream stream = nullptr,
                           AmaxReducer reduce = nullptr) const {
    return quantizer->run(with_workspace(call, workspace.as()), stream, reduce);
  }
  [[nodiscard]] Status run(const DeviceBuffer& x, int64_t rows, ScaleSlots slots) const {
    return run(call(x, rows, slots));
  }
  [[nodiscard]] float8_tensor view(int64_t rows) const {
    return quantizer->view(tensor.as(), nullptr, rows).value();
  }

  std::shared_ptr<const Quantizer> quantizer;
  DeviceBuffer tensor, workspace;
};

// A linear's weight in fp8.
struct Fp8Weight : Quantized {
  Fp8Weight(const std::shared_ptr<Context>& on, const LinearDesc& linear)
      : Fp8Weight(on, weight_of(linear)) {}
  Fp8Weight(const std::shared_ptr<Context>& on, const QuantizerDesc& desc)
      : Quantized(*on, Quantizer::plan(on, desc).value()), w_tensor(view(desc.rows)) {}
  using Quantized::call;
  using Quantized::run;
  [[nodiscard]] QuantizeCall call(const Tensors& t) const {
    return call(t.device_w, w_tensor.rows, t.slots);
  }
  [[nodiscard]] Status run(const Tensors& t) const { return run(call(t)); }
  float8_tensor w_tensor;
};

// A GEMM that the recipe leaves in high precision is the library's.
inline void skip_without_library(const char* recipe) {
  if (kEmulated) return;
  const Recipe found = find_recipe(recipe).value();
  if (std::ranges::all_of(found.gemms, &GemmSetting::is_fp8)) return;
  if (const auto version = cublaslt_version(); !version) GTEST_SKIP() << version.error().message;
}

inline constexpr const char* kRecipes[] = {"tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise"};

// A test for each recipe.
class RecipeTest : public GpuTestWith<const char*> {
 protected:
  void SetUp() override {
    GpuTestWith::SetUp();
    if (!IsSkipped()) skip_without_library(GetParam());
  }
  std::shared_ptr<const Linear> plan(const LinearDesc& desc) {
    auto linear = Linear::plan(context_, desc);
    EXPECT_TRUE(linear) << (linear ? "" : linear.error().message);
    return linear ? *linear : nullptr;
  }
};

using Bits = std::vector<std::vector<uint8_t>>;
inline Bits results(const Tensors& t) {
  return {t.y.download<uint8_t>(), t.dx.download<uint8_t>(), t.dw.download<uint8_t>()};
}

}  // namespace f8::runtime::gpu
