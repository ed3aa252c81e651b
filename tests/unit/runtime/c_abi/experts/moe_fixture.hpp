// A step of the MLP of experts through the public header, on an emulated device, and the same step by two
// expert linears with everything between them in memory.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <ostream>
#include <string_view>
#include <vector>

#include "runtime/device/memory.hpp"
#include "runtime/emulation/activations.hpp"
#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace float8::testing {

using f8::Dtype;
using f8::load_element;
using f8::store_element;

constexpr int64_t kTokens = 37, kRouted = 80, kUsed = 75, kDim = 48, kHidden = 80;
constexpr int32_t kExperts = 3;

struct MoeCase {
  const char* recipe;
  bool recompute_weight, rows_in_place;
  bool w3_apart = false;
};

inline void PrintTo(const MoeCase& c, std::ostream* out) {
  *out << c.recipe << (c.recompute_weight ? "_recompute" : "")
       << (c.rows_in_place ? "_in_place" : "") << (c.w3_apart ? "_w3_apart" : "");
}

// The operands of a step, and the plans of both ways to compute it.
class MoeAbi : public ::testing::TestWithParam<MoeCase> {
 protected:
  static constexpr int64_t kRowsOfW13 = kExperts * 2 * kHidden, kRowsOfW2 = kExperts * kDim;

  void SetUp() override {
    const float8_group_layout_desc of_layout{
        .struct_size = sizeof of_layout, .m_max = kRouted, .experts = kExperts, .reserved = 0};
    ASSERT_EQ(float8_group_layout_plan_create(context_.get(), &of_layout, &layouts_), FLOAT8_OK);
    layout_ = memory(float8_group_layout_bytes(layouts_));
    const float8_group_layout_args routing{
        .offsets = offsets_.data(), .m = kRouted, .layout = {layout_.get()}};
    ASSERT_EQ(float8_group_layout(layouts_, &routing, nullptr), FLOAT8_OK);
    for (int64_t r = 0; r < kRouted; ++r) {
      index_.push_back(in_place() ? static_cast<int32_t>(r)
                                  : static_cast<int32_t>(r * 29 % kTokens));
      score_.push_back(in_place() ? 1.0F : 0.25F + 0.01F * static_cast<float>(r));
    }
  }
  void TearDown() override {
    float8_scales_destroy(scales_of_moe_.scales);
    float8_scales_destroy(scales_of_linears_.scales);
    float8_moe_destroy(moe_);
    float8_experts_destroy(w13_);
    float8_experts_destroy(w2_);
    float8_group_layout_plan_destroy(layouts_);
  }
  [[nodiscard]] static bool is_delayed() {
    return std::string_view(GetParam().recipe) == "delayed";
  }
  [[nodiscard]] bool in_place() const { return GetParam().rows_in_place; }
  [[nodiscard]] int64_t tokens() const { return in_place() ? kRouted : kTokens; }

  float8_moe_desc desc() const {
    float8_moe_desc out{};
    out.struct_size = sizeof out;
    out.m_max = kRouted;
    out.dim = kDim;
    out.hidden = kHidden;
    out.experts = kExperts;
    out.recipe = GetParam().recipe;
    out.accumulate_grad_weight = 1;
    out.non_finite = non_finite_;
    out.recompute_weight = GetParam().recompute_weight ? 1 : 0;
    out.rows_in_place = in_place() ? 1 : 0;
    out.w3_apart = GetParam().w3_apart ? 1 : 0;
    return out;
  }
  float8_experts* plan_experts(int64_t n, int64_t k) {
    float8_experts_desc out{};
    out.struct_size = sizeof out;
    out.m_max = kRouted;
    out.n = n;
    out.k = k;
    out.experts = kExperts;
    out.recipe = GetParam().recipe;
    float8_experts* made = nullptr;
    EXPECT_EQ(float8_experts_plan(context_.get(), &out, &made), FLOAT8_OK) << float8_last_error();
    return made;
  }
  // A scale state of two expert linears; none without delayed scaling.
  struct State {
    float8_scales* scales = nullptr;
    Memory memory;
    size_t bytes = 0;
    float8_scale_slots slots[2] = {};
  };
  void make_state(State& state, const float8_experts* first, const float8_experts* second) {
    const float8_experts* const linears[] = {first, second};
    float8_scales_desc of{};
    of.struct_size = sizeof of;
    of.experts = linears;
    of.experts_count = 2;
    ASSERT_EQ(float8_scales_plan(context_.get(), &of, &state.scales), FLOAT8_OK);
    state.bytes = float8_scales_bytes(state.scales);
    state.memory = memory(state.bytes);
    ASSERT_EQ(float8_scales_init(state.scales, state.memory.get(), nullptr), FLOAT8_OK);
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_EQ(float8_scales_slots(state.scales, state.memory.get(), i, &state.slots[i]),
                FLOAT8_OK);
    }
  }
  // Half of each expert's rows of w13, or of its gradient.
  [[nodiscard]] static Memory half_of(const Memory& both, int half) {
    constexpr int64_t kBytes = kHidden * kDim * 2;
    Memory out = memory(kExperts * kBytes);
    for (int64_t e = 0; e < kExperts; ++e) {
      std::memcpy(static_cast<uint8_t*>(out.get()) + e * kBytes,
                  static_cast<const uint8_t*>(both.get()) + (2 * e + half) * kBytes, kBytes);
    }
    return out;
  }

  void plan() {
    const float8_moe_desc of = desc();
    ASSERT_EQ(float8_moe_plan(context_.get(), &of, &moe_), FLOAT8_OK) << float8_last_error();
    w13_ = plan_experts(2 * kHidden, kDim);
    w2_ = plan_experts(kDim, kHidden);
    if (is_delayed()) {
      make_state(scales_of_moe_, float8_moe_linear(moe_, 0), float8_moe_linear(moe_, 1));
      make_state(scales_of_linears_, w13_, w2_);
    }
    if (GetParam().w3_apart) {
      w3_weight_ = half_of(w13_weight_, 1);
      w13_weight_of_moe_ = half_of(w13_weight_, 0);
    }
    saved_ = memory(float8_moe_saved_bytes(moe_));
    workspace_ = memory(float8_moe_workspace_bytes(moe_));
  }
  template <class Args>
  void set_weights(Args& out) const {
    out.w13 = {(GetParam().w3_apart ? w13_weight_of_moe_ : w13_weight_).get()};
    if (GetParam().w3_apart) out.w3 = {w3_weight_.get()};
    out.w2 = {w2_weight_.get()};
  }
  template <class Args>
  void set_common(Args& out) const {
    out.layout = {layout_.get()};
    out.saved = {saved_.get()};
    out.workspace = {workspace_.get()};
    out.step = &step_;
    out.w13_scales = scales_of_moe_.slots[0];
    out.w2_scales = scales_of_moe_.slots[1];
  }
  float8_moe_forward_args forward_args(const Memory& y) const {
    float8_moe_forward_args out{.m = kRouted, .tokens = tokens(), .x = {x_.get()}};
    if (!in_place()) out.index = index_.data();
    set_weights(out);
    out.y = {y.get()};
    set_common(out);
    return out;
  }
  float8_moe_backward_args backward_args(const Memory& dx, const Memory& dw13,
                                         const Memory& dw2) const {
    float8_moe_backward_args out{.m = kRouted, .tokens = tokens(), .x = {x_.get()}};
    out.dy = {dy_.get()};
    if (!in_place()) {
      out.index = index_.data();
      out.score = score_.data();
    }
    if (GetParam().recompute_weight) set_weights(out);
    out.dx = {dx.get()};
    out.dw13 = {dw13.get()};
    // The gradient of w3 comes behind that of w1.
    if (GetParam().w3_apart) out.dw3 = {static_cast<uint8_t*>(dw13.get()) + kRowsOfW13 * kDim};
    out.dw2 = {dw2.get()};
    set_common(out);
    return out;
  }
  // Rows of tokens by their index, times a factor of each.
  Memory gathered(const Memory& from, const std::vector<float>& factors) const {
    Memory out = memory(kRouted * kDim * 2);
    for (int64_t i = 0; i < kRouted * kDim; ++i) {
      const auto r = static_cast<size_t>(i / kDim);
      const float value = load_element(from.get(), index_[r] * kDim + i % kDim, Dtype::kBf16);
      store_element(out.get(), i, value * factors[r], Dtype::kBf16);
    }
    return out;
  }
  struct Step {
    Memory y, dx, dw13, dw2;
  };
  Step by_experts();
  // The gradient of w13 as one tensor.
  [[nodiscard]] static Memory joined(const Memory& dw13);
  // What a call does not write is NaN: where two blocks of a workspace shared bytes, results were.
  void poison() const { std::memset(workspace_.get(), 0xFF, float8_moe_workspace_bytes(moe_)); }
  void expect_same(const Memory& a, const Memory& b, int64_t elements, const char* name) const {
    EXPECT_EQ(std::memcmp(a.get(), b.get(), static_cast<size_t>(elements) * 2), 0) << name;
  }

  float8::Context context_ = emulated();
  std::vector<int32_t> offsets_ = {31, 31, kUsed}, index_;
  std::vector<float> score_;
  Memory x_ = random_bf16(kRouted * kDim, 1), dy_ = random_bf16(kRouted * kDim, 2);
  Memory w13_weight_ = random_bf16(kRowsOfW13 * kDim, 3);
  Memory w2_weight_ = random_bf16(kRowsOfW2 * kHidden, 4);
  Memory w13_weight_of_moe_, w3_weight_;  // with w3 apart
  Memory layout_, saved_, workspace_;
  float8_step step_;
  float8_non_finite non_finite_ = FLOAT8_PROPAGATE;  // of the MLP
  State scales_of_moe_, scales_of_linears_;
  float8_group_layout_plan* layouts_ = nullptr;
  float8_moe* moe_ = nullptr;
  float8_experts *w13_ = nullptr, *w2_ = nullptr;
};

inline Memory MoeAbi::joined(const Memory& dw13) {
  if (!GetParam().w3_apart) {
    Memory same = memory(kRowsOfW13 * kDim * 2);
    std::memcpy(same.get(), dw13.get(), kRowsOfW13 * kDim * 2);
    return same;
  }
  constexpr int64_t kBytes = kHidden * kDim * 2;
  Memory out = memory(kExperts * 2 * kBytes);
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t half = 0; half < 2; ++half) {
      std::memcpy(static_cast<uint8_t*>(out.get()) + (2 * e + half) * kBytes,
                  static_cast<const uint8_t*>(dw13.get()) + (half * kExperts + e) * kBytes, kBytes);
    }
  }
  return out;
}

// The step of two expert linears, with everything between them in memory.
inline MoeAbi::Step MoeAbi::by_experts() {
  Step out{memory(kRouted * kDim * 2), memory(kRouted * kDim * 2), memory(kRowsOfW13 * kDim * 2),
           memory(kRowsOfW2 * kHidden * 2)};
  const Memory rows = gathered(x_, std::vector<float>(kRouted, 1.0F)), dy = gathered(dy_, score_);
  const Memory both = memory(kRouted * 2 * kHidden * 2), grads = memory(kRouted * 2 * kHidden * 2);
  const Memory h = memory(kRouted * kHidden * 2), dh = memory(kRouted * kHidden * 2);
  const Memory saved[] = {memory(float8_experts_saved_bytes(w13_)),
                          memory(float8_experts_saved_bytes(w2_))};
  const Memory workspace =
      memory(std::max(float8_experts_workspace_bytes(w13_), float8_experts_workspace_bytes(w2_)));
  const auto forward = [&](const float8_experts* of, const Memory& x, const Memory& w,
                           const Memory& y, const Memory& kept) {
    const float8_experts_forward_args args{.m = kRouted,
                                           .x = {x.get()},
                                           .w = {w.get()},
                                           .y = {y.get()},
                                           .layout = {layout_.get()},
                                           .saved = {kept.get()},
                                           .workspace = {workspace.get()},
                                           .step = &step_,
                                           .scales = scales_of_linears_.slots[of == w2_ ? 1 : 0]};
    ASSERT_EQ(float8_experts_forward(of, &args, nullptr), FLOAT8_OK) << float8_last_error();
  };
  const auto backward = [&](const float8_experts* of, const Memory& grad, const Memory& dx,
                            const Memory& dw, const Memory& kept) {
    const float8_experts_backward_args args{.m = kRouted,
                                            .dy = {grad.get()},
                                            .dx = {dx.get()},
                                            .dw = {dw.get()},
                                            .layout = {layout_.get()},
                                            .saved = {kept.get()},
                                            .workspace = {workspace.get()},
                                            .step = &step_,
                                            .scales = scales_of_linears_.slots[of == w2_ ? 1 : 0]};
    ASSERT_EQ(float8_experts_backward(of, &args, nullptr), FLOAT8_OK) << float8_last_error();
  };
  forward(w13_, rows, w13_weight_, both, saved[0]);
  const auto gate_and_up = [&](int64_t i) {
    const int64_t gate = i / kHidden * 2 * kHidden + i % kHidden;
    return std::pair(load_element(both.get(), gate, Dtype::kBf16),
                     load_element(both.get(), gate + kHidden, Dtype::kBf16));
  };
  for (int64_t i = 0; i < kRouted * kHidden; ++i) {
    const auto [gate, up] = gate_and_up(i);
    store_element(
        h.get(), i,
        f8::runtime::emulation::glu(f8::kernels::Activation::kSilu, gate, up, Dtype::kBf16),
        Dtype::kBf16);
  }
  forward(w2_, h, w2_weight_, out.y, saved[1]);
  backward(w2_, dy, dh, out.dw2, saved[1]);
  for (int64_t i = 0; i < kRouted * kHidden; ++i) {
    const auto [gate, up] = gate_and_up(i);
    const auto of =
        f8::runtime::emulation::glu_backward(f8::kernels::Activation::kSilu, gate, up,
                                             load_element(dh.get(), i, Dtype::kBf16), Dtype::kBf16);
    const int64_t at = i / kHidden * 2 * kHidden + i % kHidden;
    store_element(grads.get(), at, of.gate, Dtype::kBf16);
    store_element(grads.get(), at + kHidden, of.up, Dtype::kBf16);
  }
  backward(w13_, grads, out.dx, out.dw13, saved[0]);
  return out;
}

inline const auto kMoeCases = ::testing::Values(
    MoeCase{"tensorwise", false, false}, MoeCase{"tensorwise", true, true},
    MoeCase{"rowwise", false, false}, MoeCase{"rowwise", true, false},
    MoeCase{"rowwise", true, true}, MoeCase{"blockwise", false, true},
    MoeCase{"blockwise", true, false}, MoeCase{"delayed", false, false},
    MoeCase{"delayed", true, true}, MoeCase{"tensorwise", true, false, true},
    MoeCase{"rowwise", false, true, true}, MoeCase{"rowwise", true, false, true},
    MoeCase{"blockwise", false, false, true}, MoeCase{"blockwise", true, true, true},
    MoeCase{"delayed", true, false, true});

}  // namespace float8::testing
