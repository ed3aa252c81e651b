// Eight fp32 values as eight elements of a type.
#pragma once

#include "codegen/kernels/cast/matrix_tile.cuh"

namespace f8::kernels {

template <Input kOut>
F8_DEVICE Vec8<kOut> rounded(const float (&value)[8]) {
  Vec8<kOut> vector;
#pragma unroll
  for (int i = 0; i < vector.kWords; ++i) {
    if constexpr (kOut == Input::kF32) {
      vector.word[i] = __float_as_uint(value[i]);
    } else {
      vector.word[i] = pack_pair<kOut>(value[2 * i], value[2 * i + 1]);
    }
  }
  return vector;
}

}  // namespace f8::kernels
