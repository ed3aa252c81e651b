// Mixtures of experts: the routing, the MLP of SwiGLU experts, and the sums of each token's rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "float8/experts.hpp"
#include "float8/moe.h"
#include "float8/moe_route.hpp"

namespace float8 {

using MoeForwardArgs = float8_moe_forward_args;
using MoeBackwardArgs = float8_moe_backward_args;
using MoeBuffers = float8_moe_buffers;

struct MoeDesc {
  std::int64_t m_max = 0;   // the rows of all experts together
  std::int64_t dim = 0;     // the elements of a token
  std::int64_t hidden = 0;  // the rows of gate, and those of up
  std::int32_t experts = 0;
  Recipe recipe = Recipe::tensorwise();
  float8_dtype tensor_dtype = FLOAT8_BF16;
  float8_dtype grad_weight_dtype = FLOAT8_BF16;
  bool accumulate_grad_weight = false;
  float8_non_finite non_finite = FLOAT8_PROPAGATE;
  std::int32_t sm_limit = 0;
  bool recompute_weight = false;
  bool rows_in_place = false;  // x and dy are the rows of experts themselves
  bool w3_apart = false;       // w13 is w1 alone, and w3 another tensor
  bool needs_grad_w13 = true;  // of both w1 and w3
  bool needs_grad_w2 = true;
};

// The MLP of all experts. Copies are the same MLP.
class Moe {
 public:
  static Result<Moe> plan(const Context& context, const MoeDesc& desc) {
    const auto recipe = desc.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    float8_moe_desc c{};
    c.struct_size = sizeof c;
    c.m_max = desc.m_max;
    c.dim = desc.dim;
    c.hidden = desc.hidden;
    c.experts = desc.experts;
    c.tensor_dtype = desc.tensor_dtype;
    c.custom_recipe = &settings;
    c.grad_weight_dtype = desc.grad_weight_dtype;
    c.accumulate_grad_weight = desc.accumulate_grad_weight ? 1 : 0;
    c.non_finite = desc.non_finite;
    c.sm_limit = desc.sm_limit;
    c.recompute_weight = desc.recompute_weight ? 1 : 0;
    c.rows_in_place = desc.rows_in_place ? 1 : 0;
    c.w3_apart = desc.w3_apart ? 1 : 0;
    c.no_grad_w13 = desc.needs_grad_w13 ? 0 : 1;
    c.no_grad_w2 = desc.needs_grad_w2 ? 0 : 1;
    float8_moe* handle = nullptr;
    const float8_status status = float8_moe_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Moe(handle, desc);
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_moe_workspace_bytes(handle_.get());
  }
  [[nodiscard]] std::size_t saved_bytes() const { return float8_moe_saved_bytes(handle_.get()); }
  // The workspace of one call: a float8_moe_call, with FLOAT8_MOE_WEIGHTS_GIVEN or without.
  [[nodiscard]] std::size_t call_bytes(std::int32_t call) const {
    return float8_moe_call_bytes(handle_.get(), call);
  }
  [[nodiscard]] std::size_t buffer_bytes(float8_moe_buffer buffer) const {
    return float8_moe_buffer_bytes(handle_.get(), buffer);
  }
  // The expert linear of w13 (0) or w2 (1), for ScalesOptions::experts. It is the MLP's.
  [[nodiscard]] const float8_experts* linear(std::int32_t index) const {
    return float8_moe_linear(handle_.get(), index);
  }
  Status forward(MoeForwardArgs args, float8_stream stream) const {
    set_rows(args);
    return Status(float8_moe_forward(handle_.get(), &args, stream));
  }
  Status backward(MoeBackwardArgs args, float8_stream stream) const {
    set_rows(args);
    return Status(float8_moe_backward(handle_.get(), &args, stream));
  }
  [[nodiscard]] std::int64_t m_max() const { return m_max_; }
  [[nodiscard]] const float8_moe* get() const { return handle_.get(); }

 private:
  Moe(float8_moe* handle, const MoeDesc& desc)
      : handle_(handle, float8_moe_destroy),
        m_max_(desc.m_max),
        rows_in_place_(desc.rows_in_place) {}
  template <class Args>
  void set_rows(Args& args) const {
    if (args.m == -1) args.m = m_max_;
    if (args.tokens == -1 && rows_in_place_) args.tokens = args.m;
  }
  std::shared_ptr<const float8_moe> handle_;
  std::int64_t m_max_;
  bool rows_in_place_;
};

}  // namespace float8
