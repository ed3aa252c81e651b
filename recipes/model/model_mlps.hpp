// The MLPs among the linears of a model: two or three that stand alone in one module, of which the last one takes
// what the others give back to its features. One linear may make gate and up.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "recipes/problem.hpp"

namespace f8 {

struct ModelMlp {
  std::vector<size_t> linears;  // indices: gate and up, what makes both, or up alone; then down
  int64_t features = 0;
  int64_t hidden = 0;
  bool gate = false;
};
// Where hidden and features are equal, sizes alone do not tell an MLP from other modules, such as an attention's, so that
// the last parts of names do: gate_proj, up_proj, down_proj, w1 to w3, fc1 and fc2, and others that only MLPs have.
[[nodiscard]] std::vector<ModelMlp> mlps_of(std::span<const NamedLinear> layers);

}  // namespace f8
