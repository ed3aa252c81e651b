// What the calls of expert linears and of the MLP of experts have in common.
#pragma once

#include <array>
#include <optional>
#include <stdexcept>
#include <string>

#include "python/shim/experts/weights.hpp"
#include "python/shim/plans/plans.hpp"
#include "python/shim/scales/scales.hpp"

namespace float8_torch {

inline int64_t bytes_of(const GroupLayoutPlan& plan) {
  return static_cast<int64_t>(plan.bytes);
}

inline int32_t checked_experts(int64_t experts) {
  if (experts >= 1 && experts <= FLOAT8_MAX_EXPERTS) return static_cast<int32_t>(experts);
  throw std::invalid_argument("float8: " + std::to_string(experts) + " experts; they are 1 to " +
                              std::to_string(FLOAT8_MAX_EXPERTS));
}

inline const GroupLayoutPlan& layout_plan(int64_t m, int64_t experts, const Place& place) {
  const GroupLayoutKey key{.m_max = kExpertRows * expert_row_blocks(m),
                           .experts = checked_experts(experts),
                           .device = place.key()};
  return group_layout_for(key, place);
}

// What forward and backward of an expert linear have in common.
struct ExpertsCall {
  Config config;
  Place place;
  int32_t dtype;  // of x, y and their gradients
  int64_t experts, n, k;

  ExpertsCall(const Tensor& rows, int64_t config_bits, int64_t count, int64_t out, int64_t in)
      : config(config_bits),
        place(place_of(rows, config)),
        dtype(dtype_of(rows)),
        experts(checked_experts(count)),
        n(out),
        k(in) {}

  [[nodiscard]] ExpertsKey key(int64_t m, float8_dtype grad_dtype) const {
    return {.config = config.of_experts(),
            .m_max = kExpertRows * expert_row_blocks(m),
            .n = n,
            .k = k,
            .experts = static_cast<int32_t>(experts),
            .device = place.key(),
            .tensor_dtype = static_cast<int8_t>(element_type(dtype, "x")),
            .grad_dtype = static_cast<int8_t>(grad_dtype)};
  }
  [[nodiscard]] const MoePlan& moe_plan(int64_t m, float8_dtype grad_dtype, bool in_place,
                                        bool w3_apart) const {
    return moe_for({.linear = key(m, grad_dtype), .rows_in_place = in_place, .w3_apart = w3_apart},
                   place);
  }

  // A layout has the bytes that its experts and the plan's largest m give it, no more and no fewer.
  [[nodiscard]] float8_buffer layout_of(const Tensor& layout, int64_t m) const {
    check_dense(layout, 1, place.device, "the layout of a routing");
    const int64_t bytes = bytes_of(layout_plan(m, experts, place));
    if (layout.numel() != bytes) {
      throw std::invalid_argument(
          "float8: the layout of a routing has " + std::to_string(layout.numel()) + " bytes, and " +
          std::to_string(m) + " rows of " + std::to_string(experts) + " experts have " +
          std::to_string(bytes) + "; it was made for another number of rows or experts");
    }
    return {layout.mutable_data_ptr(), static_cast<size_t>(bytes)};
  }

  // grad_weight is in high precision.
  [[nodiscard]] bool reads_x() const {
    return config.recipe().grad_weight.a.scaling == FLOAT8_HIGH_PRECISION;
  }
  // grad_input reads the weight: it casts it again, or is in high precision.
  [[nodiscard]] bool reads_weight() const {
    return config.recompute() || config.recipe().grad_input.a.scaling == FLOAT8_HIGH_PRECISION;
  }
  // The type in which the plan gives dw, as in linear_backward.
  [[nodiscard]] float8_dtype grad_type(float8_dtype weight) const {
    const bool same = weight == FLOAT8_F32 || weight == element_type(dtype, "x");
    return same || !reads_x() ? weight : FLOAT8_F32;
  }
  // The x of a forward, where grad_weight is computed from it.
  [[nodiscard]] Matrix input_again(const std::optional<Tensor>& x, int64_t m) const {
    if (!x || device_of(*x) != place.device || x->dim() != 2 || x->size(0) != m) {
      throw std::invalid_argument(
          "float8: backward of this recipe reads the rows of experts: give it those of forward");
    }
    return rows_of(to_dtype(*x, dtype), k, "x");
  }
  // The maxima over ranks of so many groups or rows, NULL without.
  [[nodiscard]] const uint32_t* maxima_of(const std::optional<Tensor>& words, int64_t count) const {
    if (!words) return nullptr;
    check_dense(*words, sizeof(uint32_t), place.device, "maxima over ranks");
    if (words->numel() == count) return static_cast<const uint32_t*>(words->mutable_data_ptr());
    throw std::invalid_argument("float8: there are " + std::to_string(words->numel()) +
                                " maxima over ranks of " + std::to_string(count) +
                                " groups or rows");
  }
  // Sets the part of a scale state that a call reads and raises; `plan` is one of the recipe.
  void set_scales(float8_scale_slots& slots, float8_step& step, const Tensor& tensor,
                  int64_t layout, const float8_experts* plan) const {
    if (device_of(tensor) != place.device) {
      throw std::invalid_argument("float8: a scale state is on another device than the rows");
    }
    const Scales scales(tensor, layout, config, place);
    slots = scales.slots({.experts = plan});
    step.first_step = step.first_step != 0 || scales.first_step() ? 1 : 0;
  }
  // Those of both linears of an MLP. Where one of them has no scales yet, both are scaled by their tensors.
  template <class Args>
  void set_scales(Args& args, float8_step& step, const std::optional<Tensor>& of_w13,
                  const std::optional<Tensor>& of_w2, int64_t layout, const MoePlan& plan) const {
    if (!of_w13 || !of_w2) return;
    const float8_experts* const any = float8_moe_linear(plan.moe, 0);
    set_scales(args.w13_scales, step, *of_w13, layout, any);
    set_scales(args.w2_scales, step, *of_w2, layout, any);
  }

  // A weight of these sizes, or its q or qt in fp8.
  [[nodiscard]] ExpertWeight weight_of(const std::optional<Tensor>& weight,
                                       const std::optional<Tensor>& copy,
                                       const std::optional<Tensor>& scales, int64_t out, int64_t in,
                                       bool q) const {
    return {weight, copy, scales, {experts, out, in}, config, dtype, place.device, q};
  }

  [[nodiscard]] static int64_t cols_of(const Tensor& tensor, const char* name) {
    if (tensor.dim() == 2) return tensor.size(1);
    throw std::invalid_argument(std::string("float8: ") + name + " has " +
                                std::to_string(tensor.dim()) +
                                " dimensions; rows of experts have 2");
  }
  [[nodiscard]] Matrix rows_of(const Tensor& tensor, int64_t cols, const char* name) const {
    (void)cols_of(tensor, name);
    Matrix rows = as_matrix(tensor);
    if (rows.cols == cols) return rows;
    throw std::invalid_argument(std::string("float8: ") + name + " has rows of " +
                                std::to_string(rows.cols) + " elements, and the experts' weights " +
                                std::to_string(cols));
  }
};

inline Tensor empty_matrix(int64_t rows, int64_t cols, int32_t dtype, const Device& device) {
  const std::array<int64_t, 2> sizes = {rows, cols};
  return empty(sizes, dtype, device);
}

inline float8_dtype checked_grad_dtype(int64_t dtype) {
  if (dtype >= FLOAT8_BF16 && dtype <= FLOAT8_F16) return static_cast<float8_dtype>(dtype);
  throw std::invalid_argument("float8: grad_dtype is " + std::to_string(dtype) +
                              "; it is 0 (bfloat16), 1 (float32) or 2 (float16)");
}

// [experts][n][k], or nothing where it is not wanted.
inline Tensor grad_of_weight(bool wanted, int64_t experts, int64_t n, int64_t k, float8_dtype type,
                             const Device& device) {
  const std::array<int64_t, 3> size = {wanted ? experts : 0, n, k};
  return empty(size, code_of(type), device);
}

}  // namespace float8_torch
