// Scale arithmetic. A scale multiplies towards fp8, its inverse back; both are fp32.
//
//   amax   max |x| as a float; NaN propagates (the maximum of the absolute bit patterns as
//          integers)
//   scale  fp32( FMAX / max(fp64(amax), 1e-12) ): one division in fp64, one rounding
//   pow2   mantissa bits cleared: the largest power of two that is not larger
//
// A policy decides what an amax that is not finite does. `propagate`: a NaN amax gives a NaN scale,
// with pow2 too, and an infinite amax gives scale 0, whose inverse is infinite; a GEMM of either
// gives NaN. `saturate`: casts saturate. The scale is 1, so that finite values are cast as they are and
// infinities become the format's largest value. (Delayed scaling freezes: it keeps its scale.)
#pragma once

#include <cstdint>

#include "recipes/dtype.hpp"

namespace f8 {

enum class NonFinite : uint8_t { kPropagate, kSaturate };

[[nodiscard]] float scale_from_amax(float amax, Dtype format, bool pow2,
                                    NonFinite non_finite = NonFinite::kPropagate);
[[nodiscard]] float power_of_two(float scale);   // the largest that is not larger; NaN stays NaN
[[nodiscard]] float inverse_scale(float scale);  // 1 / scale, fp32
[[nodiscard]] uint8_t cast_to_fp8(float value, float scale, Dtype format);

}  // namespace f8
