// MLPs as an operation: their sizes in problem keys, their linears and their counts.
//
//   dims := "m" INT "n" INT "k" INT "gate" ("0"|"1") "e" INT "skew" INT
//           tokens, hidden features, features, whether there is a gate, experts or 0, and their routing's skew
//
// An MLP without a gate is down(f(up(x))), one with a gate down(f(gate(x)) * up(x)). An MLP of experts has one
// such MLP of each expert, with gates, and its rows are shared as those of expert linears.
#pragma once

#include <string_view>
#include <vector>

#include "recipes/problem.hpp"

namespace f8 {

// An MLP: its hidden features are the shape's n.
struct MlpShape : Shape {
  bool gate = true;
  Groups groups{};  // of experts, which have gates
  auto operator<=>(const MlpShape&) const = default;
};
[[nodiscard]] Dims to_dims(const MlpShape& mlp);
[[nodiscard]] MlpShape mlp_shape(const Dims& dims);  // the reverse
// The linears of an MLP, which are expert linears where it is of experts: gate, where there is one, and up, or of
// experts both as one; then down.
[[nodiscard]] std::vector<Shape> linears_of(const MlpShape& mlp);

// An OpSpec of MLPs has these. Gate and up have the kernels of one linear.
inline constexpr DimSpec kMlpDims[] = {
    {.name = "m", .meaning = "tokens"},
    {.name = "n", .meaning = "hidden features", .multiple = 16},
    {.name = "k", .meaning = "features", .multiple = 16},
    {.name = "gate", .meaning = "0 or 1", .least = 0, .most = 1},
    {.name = "e", .meaning = "experts, or 0", .least = 0, .most = kMaxExperts},
    {.name = "skew", .meaning = "of the routing", .least = kEven, .most = kOneExpert}};
inline constexpr std::string_view kMlpParts[] = {"up_output",       "up_grad_input",
                                                 "up_grad_weight",  "down_output",
                                                 "down_grad_input", "down_grad_weight"};
[[nodiscard]] Status check_mlp(const Problem& problem);
[[nodiscard]] double mlp_product_flops(const Problem& problem);
[[nodiscard]] double mlp_bytes(const Problem& problem);

}  // namespace f8
