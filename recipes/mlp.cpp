// Sizes of MLPs: their checks, linears, products and bytes.
#include "recipes/mlp.hpp"

#include <algorithm>

namespace f8 {

Dims to_dims(const MlpShape& mlp) {
  return {mlp.m, mlp.n, mlp.k, mlp.gate ? 1 : 0, mlp.groups.experts, mlp.groups.skew};
}

MlpShape mlp_shape(const Dims& dims) {
  const auto [m, n, k, gate, experts, skew] = dims.sizes;
  return {{m, n, k}, gate == 1, {.experts = experts, .skew = skew}};
}

std::vector<Shape> linears_of(const MlpShape& mlp) {
  const auto [m, n, k] = static_cast<const Shape&>(mlp);
  if (mlp.groups.experts > 0) return {{m, 2 * n, k}, {m, k, n}};
  if (!mlp.gate) return {{m, n, k}, {m, k, n}};
  return {{m, n, k}, {m, n, k}, {m, k, n}};
}

Status check_mlp(const Problem& problem) {
  const MlpShape mlp = mlp_shape(problem.dims);
  if (mlp.groups.experts == 0 && mlp.groups.skew != kEven) {
    return fail(ErrorCode::kInvalidArgument, "skew {} of an MLP without experts; it is 0",
                mlp.groups.skew);
  }
  if (mlp.groups.experts > 0 && !mlp.gate) {
    return fail(ErrorCode::kInvalidArgument, "an MLP of experts without a gate; gate is 1");
  }
  return {};
}

// It counts one product of each of its linears.
double mlp_product_flops(const Problem& problem) {
  const MlpShape mlp = mlp_shape(problem.dims);
  return 2.0 * (mlp.gate ? 3 : 2) * static_cast<double>(mlp.m) * static_cast<double>(mlp.n) *
         static_cast<double>(mlp.k);
}

// x, y, dy, dx, the hidden features and weights and their gradients once each.
double mlp_bytes(const Problem& problem) {
  const MlpShape mlp = mlp_shape(problem.dims);
  const auto experts = static_cast<double>(std::max<int64_t>(mlp.groups.experts, 1));
  const double hidden = mlp.gate ? 3 : 2;
  const auto m = static_cast<double>(mlp.m), n = static_cast<double>(mlp.n),
             k = static_cast<double>(mlp.k);
  return static_cast<double>(size_bytes(problem.d)) *
         (4 * m * k + 2 * hidden * m * n + 2 * hidden * experts * n * k);
}

}  // namespace f8
