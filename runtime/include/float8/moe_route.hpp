// The routing of a mixture of experts, and the sums of each token's rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "float8/context.hpp"
#include "float8/moe_route.h"

namespace float8 {

using MoeRouteArgs = float8_moe_route_args;
using MoeCombineArgs = float8_moe_combine_args;
using MoeScoreGradientArgs = float8_moe_score_gradient_args;

struct MoeRouteDesc {
  std::int64_t tokens_max = 0;
  std::int32_t top_k = 0;  // the experts of a token
  std::int32_t experts = 0;
  bool long_ids = false;  // topk_ids are int64, else int32
};

// Sorts the pairs of a token and one of its experts by expert. Copies are the same plan.
class MoeRoute {
 public:
  static Result<MoeRoute> plan(const Context& context, const MoeRouteDesc& desc) {
    float8_moe_route_desc c{};
    c.struct_size = sizeof c;
    c.tokens_max = desc.tokens_max;
    c.top_k = desc.top_k;
    c.experts = desc.experts;
    c.long_ids = desc.long_ids ? 1 : 0;
    float8_moe_route_plan* handle = nullptr;
    const float8_status status = float8_moe_route_plan_create(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return MoeRoute(handle, desc.tokens_max);
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_moe_route_workspace_bytes(handle_.get());
  }
  Status run(MoeRouteArgs args, float8_stream stream) const {
    if (args.tokens == -1) args.tokens = tokens_max_;
    return Status(float8_moe_route(handle_.get(), &args, stream));
  }
  [[nodiscard]] const float8_moe_route_plan* get() const { return handle_.get(); }

 private:
  MoeRoute(float8_moe_route_plan* handle, std::int64_t tokens_max)
      : handle_(handle, float8_moe_route_plan_destroy), tokens_max_(tokens_max) {}
  std::shared_ptr<const float8_moe_route_plan> handle_;
  std::int64_t tokens_max_;
};

struct MoeCombineDesc {
  std::int64_t tokens_max = 0;
  std::int64_t cols = 0;  // of a row
  std::int32_t top_k = 0;
  std::int32_t experts = 0;
  float8_dtype y_dtype = FLOAT8_BF16;    // the type of rows
  float8_dtype out_dtype = FLOAT8_BF16;  // the type of tokens
};

// Adds up each token's rows by their scores. Copies are the same plan.
class MoeCombine {
 public:
  static Result<MoeCombine> plan(const Context& context, const MoeCombineDesc& desc) {
    float8_moe_combine_desc c{};
    c.struct_size = sizeof c;
    c.tokens_max = desc.tokens_max;
    c.cols = desc.cols;
    c.top_k = desc.top_k;
    c.experts = desc.experts;
    c.y_dtype = desc.y_dtype;
    c.out_dtype = desc.out_dtype;
    float8_moe_combine_plan* handle = nullptr;
    const float8_status status = float8_moe_combine_plan_create(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return MoeCombine(handle, desc.tokens_max);
  }
  // Without scores it gives the gradient of tokens from that of their rows.
  Status run(MoeCombineArgs args, float8_stream stream) const {
    if (args.tokens == -1) args.tokens = tokens_max_;
    return Status(float8_moe_combine(handle_.get(), &args, stream));
  }
  Status score_gradient(MoeScoreGradientArgs args, float8_stream stream) const {
    if (args.tokens == -1) args.tokens = tokens_max_;
    return Status(float8_moe_score_gradient(handle_.get(), &args, stream));
  }
  [[nodiscard]] const float8_moe_combine_plan* get() const { return handle_.get(); }

 private:
  MoeCombine(float8_moe_combine_plan* handle, std::int64_t tokens_max)
      : handle_(handle, float8_moe_combine_plan_destroy), tokens_max_(tokens_max) {}
  std::shared_ptr<const float8_moe_combine_plan> handle_;
  std::int64_t tokens_max_;
};

}  // namespace float8
