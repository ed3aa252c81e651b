// The list of weights that `bench cast --list` takes. A weight may occur more than once, and the
// order is kept.
//
//   list   := weight (";" weight)*
//   weight := N "," K ["*" COUNT]       out_features, in_features: multiples of 16
#pragma once

#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/recipe.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "runtime/quantize/quantize_list.hpp"

namespace f8::tuner {

inline constexpr size_t kMaxWeights = 10'000;  // of one list

// The error names the weight and what is wrong with it.
[[nodiscard]] Result<std::vector<runtime::MatrixSize>> parse_weight_list(std::string_view text);

// The bytes that the casts of an element move where no kernel pass finds it in a cache: it is read for the
// amax where the recipe's scales need one, read again, and written as fp8. 0: there are no casts.
[[nodiscard]] double cast_bytes(const runtime::LinearKernels& kernels, runtime::CopySet copies);
// Those of all elements of the weights.
[[nodiscard]] Result<double> cast_bytes(const Recipe& recipe,
                                        const std::vector<runtime::MatrixSize>& weights);

}  // namespace f8::tuner
