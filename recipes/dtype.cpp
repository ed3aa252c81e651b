// Every encoder works on the bits of |value|: the fp32 code without its sign orders like the
// magnitude, and so does each target format's.
#include "recipes/dtype.hpp"

#include <array>
#include <bit>

#include "base/text.hpp"

namespace f8 {
namespace {

constexpr uint32_t kF32Inf = 0x7f800000;
constexpr int kF32MantissaBits = 23;
constexpr int kF32Bias = 127;

struct Format {
  int mantissa_bits;
  int bias;
  uint32_t max_code;  // the code of the largest finite magnitude
};
constexpr Format kE4m3Format = {3, 7, 0x7e};
constexpr Format kE5m2Format = {2, 15, 0x7b};
constexpr Format kF16Format = {10, 15, 0x7bff};

constexpr const Format& fp8_format(Dtype t) {
  return t == Dtype::kE5m2 ? kE5m2Format : kE4m3Format;
}

constexpr uint32_t shift_right_nearest_even(uint32_t x, int shift) {
  const uint32_t half = uint32_t{1} << (shift - 1);
  const uint32_t odd = (x >> shift) & 1;
  return (x + half - 1 + odd) >> shift;
}

// The code of a finite magnitude as if the format's exponent had no upper end: the caller compares
// the result with max_code, so that rounding decides about overflow and not the input's size.
constexpr uint32_t round_magnitude(uint32_t magnitude, const Format& f) {
  const int shift = kF32MantissaBits - f.mantissa_bits;
  const int exponent = static_cast<int>(magnitude >> kF32MantissaBits) - kF32Bias;
  const int below_normal = (1 - f.bias) - exponent;
  if (below_normal <= 0) {
    const uint32_t rebias = static_cast<uint32_t>(kF32Bias - f.bias) << kF32MantissaBits;
    return shift_right_nearest_even(magnitude - rebias, shift);
  }
  // The value is subnormal in the target: the implicit one becomes explicit and moves right. A
  // subnormal fp32 has no implicit one, but lies so far below every target that it is shifted out
  // either way.
  if (shift + below_normal > kF32MantissaBits + 1) return 0;
  const uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
  return shift_right_nearest_even(significand, shift + below_normal);
}

constexpr uint8_t encode(float value, const Format& f) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > kF32Inf) return 0x7f;
  uint32_t code = magnitude == kF32Inf ? f.max_code : round_magnitude(magnitude, f);
  if (code > f.max_code) code = f.max_code;
  return static_cast<uint8_t>(code | (bits >> 31 << 7));
}

constexpr float decode_finite(uint32_t code, const Format& f) {
  const uint32_t exponent = code >> f.mantissa_bits;
  const uint32_t mantissa = code & ((uint32_t{1} << f.mantissa_bits) - 1);
  if (exponent == 0) {
    const uint32_t unit = static_cast<uint32_t>(kF32Bias + 1 - f.bias - f.mantissa_bits);
    return static_cast<float>(mantissa) * std::bit_cast<float>(unit << kF32MantissaBits);
  }
  const auto rebias = static_cast<uint32_t>(kF32Bias - f.bias);
  return std::bit_cast<float>((exponent + rebias) << kF32MantissaBits |
                              mantissa << (kF32MantissaBits - f.mantissa_bits));
}

constexpr float decode(uint8_t bits, Dtype t) {
  const Format& f = fp8_format(t);
  const uint32_t code = bits & 0x7f;
  const uint32_t sign = static_cast<uint32_t>(bits >> 7) << 31;
  uint32_t magnitude = 0;
  if (code <= f.max_code) {
    magnitude = std::bit_cast<uint32_t>(decode_finite(code, f));
  } else {
    const bool inf = t == Dtype::kE5m2 && code == f.max_code + 1;
    magnitude = inf ? kF32Inf : kF32Inf | 0x400000;
  }
  return std::bit_cast<float>(magnitude | sign);
}

template <Dtype kFormat>
constexpr std::array<float, 256> kDecodeTable = [] {
  std::array<float, 256> table{};
  for (size_t i = 0; i < table.size(); ++i) table[i] = decode(static_cast<uint8_t>(i), kFormat);
  return table;
}();

static_assert(encode(448.0F, kE4m3Format) == 0x7e);
static_assert(encode(464.0F, kE4m3Format) == 0x7e && encode(1e30F, kE4m3Format) == 0x7e);
static_assert(encode(0x1p-10F, kE4m3Format) == 0 && encode(0x1.000002p-10F, kE4m3Format) == 1);
static_assert(encode(-57344.0F, kE5m2Format) == 0xfb);
static_assert(decode(0x7e, Dtype::kE4m3) == 448.0F && decode(0x7b, Dtype::kE5m2) == 57344.0F);

}  // namespace

std::string_view to_string(Dtype t) {
  switch (t) {
    case Dtype::kE4m3:
      return "e4m3";
    case Dtype::kE5m2:
      return "e5m2";
    case Dtype::kBf16:
      return "bf16";
    case Dtype::kF16:
      return "f16";
    case Dtype::kF32:
      return "f32";
  }
  return "unknown";
}

Result<Dtype> parse_dtype(std::string_view text) {
  for (const Dtype t : {Dtype::kE4m3, Dtype::kE5m2, Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    if (text == to_string(t)) return t;
  }
  return fail(ErrorCode::kInvalidArgument, "unknown type {}; one of e4m3, e5m2, bf16, f16, f32",
              quote(text));
}

uint8_t encode_fp8(float value, Dtype format) {
  return encode(value, fp8_format(format));
}

float decode_fp8(uint8_t bits, Dtype format) {
  return format == Dtype::kE5m2 ? kDecodeTable<Dtype::kE5m2>[bits]
                                : kDecodeTable<Dtype::kE4m3>[bits];
}

uint16_t encode_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > kF32Inf) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float decode_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t encode_f16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > kF32Inf) return 0x7fff;
  constexpr uint32_t kInf = kF16Format.max_code + 1;
  uint32_t code = magnitude == kF32Inf ? kInf : round_magnitude(magnitude, kF16Format);
  if (code > kInf) code = kInf;
  return static_cast<uint16_t>(code | bits >> 31 << 15);
}

float decode_f16(uint16_t bits) {
  const uint32_t code = bits & 0x7fff;
  const uint32_t sign = static_cast<uint32_t>(bits >> 15) << 31;
  const uint32_t magnitude = code <= kF16Format.max_code
                                 ? std::bit_cast<uint32_t>(decode_finite(code, kF16Format))
                                 : kF32Inf | (code & 0x3ff) << 13;
  return std::bit_cast<float>(magnitude | sign);
}

float load_element(const void* base, int64_t i, Dtype type) {
  switch (type) {
    case Dtype::kBf16:
      return decode_bf16(static_cast<const uint16_t*>(base)[i]);
    case Dtype::kF16:
      return decode_f16(static_cast<const uint16_t*>(base)[i]);
    case Dtype::kF32:
      return static_cast<const float*>(base)[i];
    default:
      return decode_fp8(static_cast<const uint8_t*>(base)[i], type);
  }
}

void store_element(void* base, int64_t i, float value, Dtype type) {
  switch (type) {
    case Dtype::kBf16:
      static_cast<uint16_t*>(base)[i] = encode_bf16(value);
      break;
    case Dtype::kF16:
      static_cast<uint16_t*>(base)[i] = encode_f16(value);
      break;
    case Dtype::kF32:
      static_cast<float*>(base)[i] = value;
      break;
    default:
      static_cast<uint8_t*>(base)[i] = encode_fp8(value, type);
  }
}

float round_element(float value, Dtype type) {
  uint32_t element = 0;
  store_element(&element, 0, value, type);
  return load_element(&element, 0, type);
}

}  // namespace f8
