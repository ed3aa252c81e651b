// Linears.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "float8/context.hpp"
#include "float8/linear.h"
#include "float8/recipe.hpp"

namespace float8 {

struct LinearDesc {
  std::int64_t m_max = 0;
  std::int64_t n = 0;  // out_features
  std::int64_t k = 0;  // in_features
  Recipe recipe = Recipe::tensorwise();
  float8_dtype grad_weight_dtype = FLOAT8_BF16;
  bool bias = false;
  bool accumulate_grad_weight = false;
  bool needs_grad_input = true;
  float8_dtype tensor_dtype = FLOAT8_BF16;
  bool recompute = false;
  bool bias_grad = false;
  float8_dtype bias_grad_dtype = FLOAT8_BF16;
  float8_non_finite non_finite = FLOAT8_PROPAGATE;
  bool count = false;
  bool accumulate_grad_input = false;
  std::int32_t sm_limit = 0;
  bool weight_shards = false;
  bool needs_grad_weight = true;

  // All but the recipe.
  [[nodiscard]] float8_linear_desc c() const {
    float8_linear_desc c{};
    c.struct_size = sizeof c;
    c.m_max = m_max;
    c.n = n;
    c.k = k;
    c.grad_weight_dtype = grad_weight_dtype;
    c.bias = bias ? 1 : 0;
    c.accumulate_grad_weight = accumulate_grad_weight ? 1 : 0;
    c.no_grad_input = needs_grad_input ? 0 : 1;
    c.tensor_dtype = tensor_dtype;
    c.recompute = recompute ? 1 : 0;
    c.bias_grad = bias_grad ? 1 : 0;
    c.bias_grad_dtype = bias_grad_dtype;
    c.non_finite = non_finite;
    c.count = count ? 1 : 0;
    c.accumulate_grad_input = accumulate_grad_input ? 1 : 0;
    c.sm_limit = sm_limit;
    c.weight_shards = weight_shards ? 1 : 0;
    c.no_grad_weight = needs_grad_weight ? 0 : 1;
    return c;
  }
};

// A linear's part of a scale state; Scales::slots gives it.
using ScaleSlots = float8_scale_slots;

// The arguments of calls are float8.h's structs. In C++ their fields have default values: the sizes
// are set, pointers are null, and m, rows and tokens are -1, which stands for m_max, rows_max and
// tokens_max. A matrix is {data}, {data, ld} or {.fp8 = &tensor}, a result {data} or
// {data, ld, accumulate}.
using Matrix = float8_matrix;
using Buffer = float8_buffer;
using Step = float8_step;
using ForwardArgs = float8_forward_args;
using BackwardArgs = float8_backward_args;

// Copies are the same linear.
class Linear {
 public:
  static Result<Linear> plan(const Context& context, const LinearDesc& desc) {
    const auto recipe = desc.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    float8_linear_desc c = desc.c();
    c.custom_recipe = &settings;
    float8_linear* handle = nullptr;
    const float8_status status = float8_linear_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Linear({handle, float8_linear_destroy}, desc.m_max);
  }

  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_linear_workspace_bytes(handle_.get());
  }
  // The same for one kind of call that is given these in fp8.
  [[nodiscard]] std::size_t forward_workspace_bytes(bool x_fp8, bool w_fp8) const {
    return float8_linear_forward_workspace_bytes(handle_.get(), x_fp8 ? 1 : 0, w_fp8 ? 1 : 0);
  }
  [[nodiscard]] std::size_t backward_workspace_bytes(bool x_fp8, bool w_fp8, bool dy_fp8) const {
    return float8_linear_backward_workspace_bytes(handle_.get(), x_fp8 ? 1 : 0, w_fp8 ? 1 : 0,
                                                  dy_fp8 ? 1 : 0);
  }
  [[nodiscard]] std::size_t saved_bytes() const { return float8_linear_saved_bytes(handle_.get()); }
  // The same for calls that are given x, or w, in fp8.
  [[nodiscard]] std::size_t saved_bytes_with_tensors(bool x_fp8, bool w_fp8) const {
    return float8_linear_saved_bytes_with_tensors(handle_.get(), x_fp8 ? 1 : 0, w_fp8 ? 1 : 0);
  }

  Status forward(ForwardArgs args, float8_stream stream) const {
    if (args.m == -1) args.m = m_max_;
    return Status(float8_linear_forward(handle_.get(), &args, stream));
  }
  Status backward(BackwardArgs args, float8_stream stream) const {
    if (args.m == -1) args.m = m_max_;
    return Status(float8_linear_backward(handle_.get(), &args, stream));
  }
  // Says what was planned and why, for people.
  [[nodiscard]] Result<std::string> info() const {
    return detail::text([this](char* text, std::size_t bytes, std::size_t* needed) {
      return float8_linear_info(handle_.get(), text, bytes, needed);
    });
  }
  [[nodiscard]] std::int64_t m_max() const { return m_max_; }
  [[nodiscard]] const float8_linear* get() const { return handle_.get(); }

 private:
  friend class Model;
  Linear(std::shared_ptr<const float8_linear> handle, std::int64_t m_max)
      : handle_(std::move(handle)), m_max_(m_max) {}
  std::shared_ptr<const float8_linear> handle_;
  std::int64_t m_max_;
};

}  // namespace float8
