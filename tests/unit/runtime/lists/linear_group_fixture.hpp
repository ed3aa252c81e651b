// Three linears of one x, their tensors, and their calls as a group and one by one.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <functional>

#include "runtime/linear/quantizer.hpp"
#include "runtime/lists/linear_group.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime::testing {

inline constexpr int64_t kM = 160, kK = 144;
inline constexpr std::array<int64_t, 3> kN = {96, 32, 48};  // Q, K and V
inline constexpr int64_t kAllN = 176;

inline Recipe recipe_of(std::string_view name) {
  return name == "bf16" ? bf16_recipe() : find_recipe(name).value();
}

// The weights that a caller gives in fp8.
enum class Weights { kCast, kGiven, kMixed };

struct Trio {
  Trio(FakeCuda& cuda, const char* recipe_name, bool bias, NonFinite non_finite)
      : context(cuda.context()), recipe(recipe_of(recipe_name)) {
    std::vector<DelayedSlot> slots;
    for (const int64_t n : kN) {
      LinearDesc desc;
      desc.shape = {kM, n, kK};
      desc.recipe = recipe;
      desc.accumulate_grad_input = desc.accumulate_grad_weight = true;
      desc.bias = desc.bias_grad = bias;
      desc.bias_grad_dtype = Dtype::kF32;
      desc.non_finite = non_finite;
      linears.push_back(Linear::plan(context, desc).value());
      weights.push_back(casts_weight(desc) ? Quantizer::plan(context, weight_of(desc)).value()
                                           : nullptr);
      first_slot.push_back(slots.size());
      const auto& of = linears.back()->scale_slots();
      slots.insert(slots.end(), of.begin(), of.end());
    }
    delayed = DelayedScales::plan(context, slots).value();
    group = LinearGroup::plan(context, linears).value();
    QuantizerDesc of_x{.operand = Tensor::kInput, .rows = kM, .cols = kK, .recipe = recipe};
    of_x.non_finite = non_finite;
    if (auto planned = Quantizer::plan(context, of_x)) quantizer = *planned;
  }

  std::shared_ptr<Context> context;
  Recipe recipe;
  std::vector<std::shared_ptr<const Linear>> linears;
  std::vector<size_t> first_slot;
  std::optional<DelayedScales> delayed;
  std::shared_ptr<const LinearGroup> group;
  std::shared_ptr<const Quantizer> quantizer;  // of x; null: the recipe makes no copy of it
  std::vector<std::shared_ptr<const Quantizer>> weights;  // the same of each w
};

// One way of computing, with everything that it writes.
struct Tensors {
  Tensors(const Trio& trio, uint64_t seed)
      : x(reference::random_matrix(kM, kK, seed, reference::Distribution::kOutliers)),
        dy(reference::random_matrix(kM, kAllN, seed + 1)),
        y(static_cast<size_t>(kM * kAllN) * 2),
        dx(static_cast<size_t>(kM * kK) * 2),
        state(trio.delayed->bytes()) {
    if (trio.delayed->bytes() > 0) {
      EXPECT_TRUE(trio.delayed->init(state.data(), nullptr));
    }
    for (size_t i = 0; i < kN.size(); ++i) {
      w.emplace_back(reference::random_matrix(kN[i], kK, seed + 10 + i));
      bias.emplace_back(reference::random_matrix(1, kN[i], seed + 20 + i));
      dw.emplace_back(static_cast<size_t>(kN[i] * kK) * 2);
      db.emplace_back(static_cast<size_t>(kN[i]) * 4);
      const auto& quantizer = trio.weights[i];
      w_fp8.emplace_back(quantizer == nullptr ? 0 : quantizer->tensor_bytes());
      w_view.push_back(quantizer == nullptr
                           ? float8_tensor()
                           : quantizer->view(w_fp8.back().data(), nullptr, kN[i]).value());
    }
  }
  [[nodiscard]] std::vector<std::vector<uint8_t>> written() {
    std::vector<std::vector<uint8_t>> out = {bytes(y), bytes(dx), bytes(state)};
    for (auto* of : {&dw, &db, &w_fp8}) {
      for (Buffer& buffer : *of) {
        EXPECT_TRUE(buffer.guard_is_whole());
        out.push_back(bytes(buffer));
      }
    }
    EXPECT_TRUE(y.guard_is_whole());
    EXPECT_TRUE(dx.guard_is_whole());
    return out;
  }

  Buffer x, dy, y, dx, state;
  std::vector<Buffer> w, bias, dw, db, w_fp8;
  std::vector<float8_tensor> w_view;
};

inline constexpr std::array kWritten = {"y",     "dx",       "state",    "dw[0]",
                                        "dw[1]", "dw[2]",    "db[0]",    "db[1]",
                                        "db[2]", "w_fp8[0]", "w_fp8[1]", "w_fp8[2]"};

struct GroupStep {
  int64_t m = kM;
  Weights weights = Weights::kCast;
  bool saved = true;
  bool first_step = true;
  bool evaluate = false;
  bool dx = true, dw = true;
  bool accumulate = false;  // into what is there
  float8_nccl_comm ranks = nullptr;

  [[nodiscard]] float8_step of_forward() const {
    return {.first_step = first_step, .evaluate = evaluate, .ranks = ranks};
  }
  [[nodiscard]] float8_step of_backward() const {
    return {.first_step = first_step, .ranks = ranks};
  }
  [[nodiscard]] bool gives(size_t i) const {
    return weights == Weights::kGiven || (weights == Weights::kMixed && i == 1);
  }
  [[nodiscard]] bool wants_dw(size_t i) const {
    return dw && (weights != Weights::kMixed || i != 2);
  }
};

inline int reductions = 0;

// Another rank has tensors whose maxima are 3.
inline Status reduce_with_three(uint32_t* amax_bits, size_t count, float8_nccl_comm /*ranks*/,
                                Stream /*stream*/) {
  ++reductions;
  for (size_t i = 0; i < count; ++i) {
    if (amax_bits[i] == 0) continue;  // of a tensor that the call does not cast
    amax_bits[i] = std::max(amax_bits[i], std::bit_cast<uint32_t>(3.0F));
  }
  return {};
}

class LinearGroupTest : public ::testing::TestWithParam<const char*> {
 protected:
  static int64_t column(size_t i) {
    int64_t at = 0;
    for (size_t j = 0; j < i; ++j) at += kN[j];
    return at * 2;
  }
  static ScaleSlots slots(const Trio& trio, Tensors& to, size_t i) {
    if (trio.delayed->count() == 0) return {};
    return trio.delayed->slots(to.state.data(), trio.first_slot[i]);
  }
  static void cast_weights(const Trio& trio, Tensors& to, const GroupStep& step) {
    const float8_step common = step.of_backward();
    for (size_t i = 0; i < kN.size(); ++i) {
      const auto& quantizer = trio.weights[i];
      if (!step.gives(i) || quantizer == nullptr) continue;
      Buffer workspace(quantizer->workspace_bytes());
      zero(workspace);
      ASSERT_TRUE(quantizer->run({.rows = kN[i],
                                  .x = {to.w[i].data()},
                                  .tensor = {to.w_fp8[i].data()},
                                  .workspace = {workspace.data()},
                                  .step = &common,
                                  .scales = slots(trio, to, i)},
                                 nullptr, reduce_with_three));
    }
  }
  static void zero(Buffer& buffer) { std::fill_n(buffer.data(), buffer.bytes(), uint8_t{0}); }
  static const float8_tensor* weight(const Trio& trio, Tensors& to, const GroupStep& step,
                                     size_t i) {
    return step.gives(i) && trio.weights[i] != nullptr ? &to.w_view[i] : nullptr;
  }

  static std::array<GroupedLinearCall, 3> members(const Trio& trio, Tensors& to,
                                                  const GroupStep& step) {
    std::array<GroupedLinearCall, 3> out;
    for (size_t i = 0; i < kN.size(); ++i) {
      const LinearDesc& desc = trio.linears[i]->desc();
      out[i] = {
          .w = {.data = to.w[i].data(), .fp8 = weight(trio, to, step, i)},
          .bias = desc.bias ? to.bias[i].data() : nullptr,
          .y = {to.y.data() + column(i), kAllN},
          .dy = {to.dy.data() + column(i), kAllN},
          .dw = {.data = step.wants_dw(i) ? to.dw[i].data() : nullptr,
                 .accumulate = step.accumulate},
          .db = {.data = desc.bias_grad ? to.db[i].data() : nullptr, .accumulate = step.accumulate},
          .scales = slots(trio, to, i)};
    }
    return out;
  }
  static void run_group(const Trio& trio, Tensors& to, const GroupStep& step) {
    cast_weights(trio, to, step);
    Buffer workspace(trio.group->workspace_bytes());
    zero(workspace);
    Buffer saved(trio.group->saved_bytes(step.weights == Weights::kGiven));
    const auto linears = members(trio, to, step);
    const float8_step of_forward = step.of_forward(), of_backward = step.of_backward();
    LinearGroupCall call{
        .m = step.m,
        .x = {to.x.data()},
        .dx = {.data = step.dx ? to.dx.data() : nullptr, .accumulate = step.accumulate},
        .linears = linears.data(),
        .count = linears.size(),
        .saved = {step.saved ? saved.data() : nullptr},
        .workspace = {workspace.data()},
        .step = &of_forward};
    const Status forward = trio.group->forward(call, nullptr, reduce_with_three);
    ASSERT_TRUE(forward) << forward.error().message;
    EXPECT_TRUE(saved.guard_is_whole());
    if (step.saved) {
      call.step = &of_backward;
      const Status backward = trio.group->backward(call, nullptr, reduce_with_three);
      ASSERT_TRUE(backward) << backward.error().message;
    }
    EXPECT_TRUE(workspace.guard_is_whole());
  }

  // The linears one by one, with an x that is cast once.
  static void run_alone(const Trio& trio, Tensors& to, const GroupStep& step) {
    cast_weights(trio, to, step);
    const float8_step of_forward = step.of_forward(), of_backward = step.of_backward();
    const float8_step alone{.first_step = step.first_step, .evaluate = step.evaluate};
    Buffer x_bytes(trio.quantizer == nullptr ? 0 : trio.quantizer->tensor_bytes());
    float8_tensor x{};
    if (trio.quantizer != nullptr) {
      Buffer scratch(trio.quantizer->workspace_bytes());
      zero(scratch);
      ASSERT_TRUE(trio.quantizer->run({.rows = step.m,
                                       .x = {to.x.data()},
                                       .tensor = {x_bytes.data()},
                                       .workspace = {scratch.data()},
                                       .step = &alone,
                                       .scales = slots(trio, to, 0)},
                                      nullptr));
      x = trio.quantizer->view(x_bytes.data(), nullptr, step.m).value();
    }
    const float8_tensor* x_tensor = trio.quantizer == nullptr ? nullptr : &x;
    const auto linears = members(trio, to, step);
    std::vector<Buffer> saved;
    for (size_t i = 0; i < kN.size(); ++i) {
      const Linear& linear = *trio.linears[i];
      const GroupedLinearCall& of = linears[i];
      saved.emplace_back(linear.saved_bytes());
      Buffer workspace(linear.workspace_bytes());
      zero(workspace);
      const Status good = linear.forward({.m = step.m,
                                          .x = {.data = to.x.data(), .fp8 = x_tensor},
                                          .w = of.w,
                                          .bias = of.bias,
                                          .y = of.y,
                                          .saved = {step.saved ? saved.back().data() : nullptr},
                                          .workspace = {workspace.data()},
                                          .step = &of_forward,
                                          .scales = of.scales},
                                         nullptr, reduce_with_three);
      ASSERT_TRUE(good) << good.error().message;
    }
    for (size_t i = 0; i < kN.size() && step.saved; ++i) {
      const Linear& linear = *trio.linears[i];
      const GroupedLinearCall& of = linears[i];
      Buffer workspace(linear.workspace_bytes());
      zero(workspace);
      const Status good = linear.backward(
          {.m = step.m,
           .dy = of.dy,
           .x = {.data = to.x.data(), .fp8 = x_tensor},
           .w = of.w,
           .dx = {.data = step.dx ? to.dx.data() : nullptr, .accumulate = i > 0 || step.accumulate},
           .dw = of.dw,
           .db = of.db,
           .saved = {saved[i].data()},
           .workspace = {workspace.data()},
           .step = &of_backward,
           .scales = of.scales},
          nullptr, reduce_with_three);
      ASSERT_TRUE(good) << good.error().message;
    }
  }

  static void expect_equal(Tensors& together, Tensors& alone) {
    const auto ours = together.written();
    const auto expected = alone.written();
    for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(ours[i] == expected[i]) << kWritten[i];
  }
  void expect_the_same(const Trio& trio, Tensors& together, Tensors& alone, const GroupStep& step) {
    run_group(trio, together, step);
    run_alone(trio, alone, step);
    expect_equal(together, alone);
    ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }

  FakeCuda cuda_;
  FakeCublasLt library_;
};

}  // namespace f8::runtime::testing
