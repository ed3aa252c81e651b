// GEMMs of tensors in fp8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "float8/context.hpp"
#include "float8/gemm.h"
#include "float8/recipe.hpp"

namespace float8 {

using GemmArgs = float8_gemm_args;

struct GemmDesc {
  float8_gemm_kind gemm = FLOAT8_OUTPUT;
  std::int64_t m_max = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Recipe recipe = Recipe::tensorwise();
  float8_dtype d_dtype = FLOAT8_BF16;
  bool bias = false;
  bool accumulate = false;
  std::int32_t sm_limit = 0;
};

// A GEMM over tensors in fp8. Copies are the same plan.
class Gemm {
 public:
  static Result<Gemm> plan(const Context& context, const GemmDesc& desc) {
    const auto recipe = desc.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    float8_gemm_desc c{};
    c.struct_size = sizeof c;
    c.m_max = desc.m_max;
    c.n = desc.n;
    c.k = desc.k;
    c.gemm = desc.gemm;
    c.d_dtype = desc.d_dtype;
    c.custom_recipe = &settings;
    c.bias = desc.bias ? 1 : 0;
    c.accumulate = desc.accumulate ? 1 : 0;
    c.sm_limit = desc.sm_limit;
    float8_gemm_plan* handle = nullptr;
    const float8_status status = float8_gemm_plan_create(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Gemm(handle);
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_gemm_workspace_bytes(handle_.get());
  }
  Status run(const GemmArgs& args, float8_stream stream) const {
    return Status(float8_gemm(handle_.get(), &args, stream));
  }
  [[nodiscard]] const float8_gemm_plan* get() const { return handle_.get(); }

 private:
  explicit Gemm(float8_gemm_plan* handle) : handle_(handle, float8_gemm_plan_destroy) {}
  std::shared_ptr<const float8_gemm_plan> handle_;
};

}  // namespace float8
