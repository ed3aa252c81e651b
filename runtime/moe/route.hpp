// The routing of a mixture of experts: which row each pair of a token and an expert has
// (codegen/kernels/experts/route.cuh).
#pragma once

#include "codegen/kernels/experts/moe_args.cuh"
#include "float8/moe_route.h"
#include "runtime/device/context.hpp"

namespace f8::runtime {

using RouteCall = float8_moe_route_args;

struct RouteDesc {
  int64_t tokens_max = 0;
  int64_t top_k = 0;
  int64_t experts = 0;
  bool long_ids = false;  // int64, not int32
};

class RoutePlan {
 public:
  // Loads the kernels.
  [[nodiscard]] static Result<RoutePlan> create(const std::shared_ptr<Context>& context,
                                                const RouteDesc& desc);
  [[nodiscard]] size_t workspace_bytes() const;
  // Enqueues two launches.
  [[nodiscard]] Status run(const RouteCall& call, Stream stream) const;

 private:
  RoutePlan(std::shared_ptr<Context> context, const RouteDesc& desc, const Kernel& count,
            const Kernel& place)
      : context_(std::move(context)), desc_(desc), count_(&count), place_(&place) {}
  [[nodiscard]] Status check(const RouteCall& call, Stream stream) const;

  std::shared_ptr<Context> context_;
  RouteDesc desc_;
  const Kernel* count_;
  const Kernel* place_;
};

// Checks the sizes of a routing.
[[nodiscard]] Status check_routing_sizes(int64_t tokens_max, int64_t top_k, int64_t experts);

}  // namespace f8::runtime
