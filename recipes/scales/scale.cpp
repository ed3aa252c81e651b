// The device computes the same operations in the same order (one fp64 division, one rounding, one
// fp32 product), so the results agree bit for bit.
#include "recipes/scales/scale.hpp"

#include <bit>
#include <cmath>

namespace f8 {
namespace {

constexpr double kSmallestAmax = 1e-12;

}  // namespace

float power_of_two(float scale) {
  // A NaN without its mantissa would be an infinity. Subnormals would become 0, but no amax gives
  // one: the largest finite amax still has a scale above 2^-120.
  if (std::isnan(scale)) return scale;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & 0xff800000U);
}

float scale_from_amax(float amax, Dtype format, bool pow2, NonFinite non_finite) {
  if (non_finite == NonFinite::kSaturate && !std::isfinite(amax)) return 1.0F;
  // A NaN passes: it is not smaller than anything.
  const double wide = amax;
  const double divisor = wide < kSmallestAmax ? kSmallestAmax : wide;
  const auto scale = static_cast<float>(static_cast<double>(max_finite(format)) / divisor);
  return pow2 ? power_of_two(scale) : scale;
}

float inverse_scale(float scale) {
  return 1.0F / scale;
}

uint8_t cast_to_fp8(float value, float scale, Dtype format) {
  return encode_fp8(value * scale, format);
}

}  // namespace f8
