// How tests cast a linear's weight apart from its calls.
#pragma once

#include "runtime/linear/tensors/quantizer.hpp"

namespace f8::runtime {

[[nodiscard]] inline QuantizerDesc weight_of(const LinearDesc& desc) {
  return {.operand = Tensor::kWeight,
          .rows = desc.shape.n,
          .cols = desc.shape.k,
          .recipe = desc.recipe,
          .dtype = desc.tensor_dtype,
          .non_finite = desc.non_finite,
          .count = desc.count};
}
[[nodiscard]] inline bool casts_weight(const LinearDesc& desc) {
  const Copies copies = linear_kernels(desc).value().of(Tensor::kWeight);
  return copies.q || copies.qt;
}

}  // namespace f8::runtime
