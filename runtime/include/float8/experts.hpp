// Linears of the experts of a mixture, and the layout of their rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "float8/experts.h"
#include "float8/linear.hpp"

namespace float8 {

using GroupLayoutArgs = float8_group_layout_args;
using GroupError = float8_group_error;
using ExpertsForwardArgs = float8_experts_forward_args;
using ExpertsBackwardArgs = float8_experts_backward_args;

struct GroupLayoutDesc {
  std::int64_t m_max = 0;
  std::int32_t experts = 0;
};

// The layout of a routing, which all expert linears and MLPs of as many experts and rows read. The
// layout itself is device memory of the caller's. Copies are the same plan.
class GroupLayout {
 public:
  static Result<GroupLayout> plan(const Context& context, const GroupLayoutDesc& desc) {
    float8_group_layout_desc c{};
    c.struct_size = sizeof c;
    c.m_max = desc.m_max;
    c.experts = desc.experts;
    float8_group_layout_plan* handle = nullptr;
    const float8_status status = float8_group_layout_plan_create(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return GroupLayout(handle, desc.m_max);
  }
  [[nodiscard]] std::size_t bytes() const { return float8_group_layout_bytes(handle_.get()); }
  Status run(GroupLayoutArgs args, float8_stream stream) const {
    if (args.m == -1) args.m = m_max_;
    return Status(float8_group_layout(handle_.get(), &args, stream));
  }
  // The first error of the offsets that `layout` was made of, since it was asked for the last time.
  // It waits for the stream.
  [[nodiscard]] Result<GroupError> error(void* layout, float8_stream stream) const {
    GroupError error;
    const float8_status status = float8_group_layout_error(handle_.get(), layout, stream, &error);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return error;
  }
  [[nodiscard]] const float8_group_layout_plan* get() const { return handle_.get(); }

 private:
  GroupLayout(float8_group_layout_plan* handle, std::int64_t m_max)
      : handle_(handle, float8_group_layout_plan_destroy), m_max_(m_max) {}
  std::shared_ptr<const float8_group_layout_plan> handle_;
  std::int64_t m_max_;
};

struct ExpertsDesc {
  std::int64_t m_max = 0;  // the rows of all experts together
  std::int64_t n = 0;      // out_features of an expert
  std::int64_t k = 0;      // in_features
  std::int32_t experts = 0;
  Recipe recipe = Recipe::tensorwise();
  float8_dtype tensor_dtype = FLOAT8_BF16;
  float8_dtype grad_weight_dtype = FLOAT8_BF16;
  bool accumulate_grad_weight = false;
  bool needs_grad_input = true;
  float8_non_finite non_finite = FLOAT8_PROPAGATE;
  std::int32_t sm_limit = 0;
  bool recompute_weight = false;
  bool x_over_ranks = false;
  bool dy_over_ranks = false;
  bool needs_grad_weight = true;
};

// A linear of each expert. Copies are the same expert linear.
class Experts {
 public:
  static Result<Experts> plan(const Context& context, const ExpertsDesc& desc) {
    const auto recipe = desc.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    float8_experts_desc c{};
    c.struct_size = sizeof c;
    c.m_max = desc.m_max;
    c.n = desc.n;
    c.k = desc.k;
    c.experts = desc.experts;
    c.tensor_dtype = desc.tensor_dtype;
    c.custom_recipe = &settings;
    c.grad_weight_dtype = desc.grad_weight_dtype;
    c.accumulate_grad_weight = desc.accumulate_grad_weight ? 1 : 0;
    c.no_grad_input = desc.needs_grad_input ? 0 : 1;
    c.non_finite = desc.non_finite;
    c.sm_limit = desc.sm_limit;
    c.recompute_weight = desc.recompute_weight ? 1 : 0;
    c.x_over_ranks = desc.x_over_ranks ? 1 : 0;
    c.dy_over_ranks = desc.dy_over_ranks ? 1 : 0;
    c.no_grad_weight = desc.needs_grad_weight ? 0 : 1;
    float8_experts* handle = nullptr;
    const float8_status status = float8_experts_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Experts(handle, desc.m_max);
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_experts_workspace_bytes(handle_.get());
  }
  [[nodiscard]] std::size_t saved_bytes() const {
    return float8_experts_saved_bytes(handle_.get());
  }
  Status forward(ExpertsForwardArgs args, float8_stream stream) const {
    if (args.m == -1) args.m = m_max_;
    return Status(float8_experts_forward(handle_.get(), &args, stream));
  }
  Status backward(ExpertsBackwardArgs args, float8_stream stream) const {
    if (args.m == -1) args.m = m_max_;
    return Status(float8_experts_backward(handle_.get(), &args, stream));
  }
  [[nodiscard]] std::int64_t m_max() const { return m_max_; }
  [[nodiscard]] const float8_experts* get() const { return handle_.get(); }

 private:
  Experts(float8_experts* handle, std::int64_t m_max)
      : handle_(handle, float8_experts_destroy), m_max_(m_max) {}
  std::shared_ptr<const float8_experts> handle_;
  std::int64_t m_max_;
};

}  // namespace float8
