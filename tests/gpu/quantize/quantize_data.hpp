// Matrices for the amax and cast tests.
#pragma once

#include <bit>
#include <limits>
#include <random>

#include "recipes/reference/reference.hpp"

namespace f8::runtime::gpu {

enum class Data {
  kOutliers,   // normal values, one in 256 of them 64 times as large
  kTiny,       // zeros (a whole row and column), subnormals, the smallest normal
  kNonFinite,  // a NaN, an infinity and a negative infinity among normal values
  kHuge,       // the largest bf16, so scales are tiny
};

inline reference::Matrix make_data(Data kind, int64_t rows, int64_t cols, uint64_t seed) {
  using Limits = std::numeric_limits<float>;
  reference::Matrix x =
      reference::random_matrix(rows, cols, seed, reference::Distribution::kOutliers);
  const auto at = [&](int64_t r, int64_t c) -> float& {
    return x.values[static_cast<size_t>(r % rows * cols + c % cols)];
  };
  switch (kind) {
    case Data::kOutliers:
      break;
    case Data::kTiny:
      for (size_t i = 0; i < x.values.size(); ++i) {
        x.values[i] = i % 3 == 0 ? 0.0F : x.values[i] * 0x1p-130F;  // bf16 keeps fewer bits of it
        x.values[i] = decode_bf16(encode_bf16(x.values[i]));
      }
      for (int64_t c = 0; c < cols; ++c) at(0, c) = c % 2 == 0 ? 0.0F : -0.0F;
      for (int64_t r = 0; r < rows; ++r) at(r, 1) = 0;
      at(rows / 2, 2) = Limits::min();
      break;
    case Data::kNonFinite:
      at(rows / 3, 3) =
          decode_bf16(encode_bf16(Limits::quiet_NaN()));  // the bits that are uploaded
      at(rows / 2, 5) = Limits::infinity();
      at(rows - 1, 7) = -Limits::infinity();
      break;
    case Data::kHuge:
      at(rows / 2, cols / 2) = -max_finite(Dtype::kBf16);
      break;
  }
  return x;
}

// fp32 elements that a 16-bit type has not: of one kind, or of all of them in turn.
enum class Floats {
  kNormal,      // around 1
  kTies,        // halfway between two neighbours in bf16, and in fp16
  kSubnormal,   // of fp32, and of fp16
  kOverflow,    // at the largest number of bf16, and of fp16
  kEverything,  // of the kinds above, and any bits at all: infinities and NaNs of any payload too
};
inline constexpr Floats kAllFloats[] = {Floats::kNormal, Floats::kTies, Floats::kSubnormal,
                                        Floats::kOverflow, Floats::kEverything};

inline reference::Matrix random_floats(Floats kind, int64_t rows, int64_t cols, uint64_t seed) {
  std::mt19937_64 random(seed * 8 + static_cast<uint64_t>(kind));
  reference::Matrix x{rows, cols, {}};
  for (int64_t i = 0; i < rows * cols; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    const uint32_t sign = bits & 0x80000000U;
    const bool other = (bits >> 30 & 1) != 0;  // of the two 16-bit types
    const auto of = [&](Floats one) -> uint32_t {
      switch (one) {
        case Floats::kNormal:
          return sign | (0x3E000000U + (bits & 0x03FFFFFFU));
        case Floats::kTies: {
          const uint32_t around_one = 0x3E000000U + (bits & 0x03FFFFFFU);
          return sign | (other ? (around_one & 0xFFFF0000U) | 0x8000U
                               : (around_one & 0xFFFFE000U) | 0x1000U);
        }
        case Floats::kSubnormal:
          return sign | (other ? bits & 0x007FFFFFU : 0x33000000U + bits % 0x05000000U);
        case Floats::kOverflow:
          return sign | (other ? 0x7F7F0000U + (bits & 0xFFFFU) : 0x477FE000U + (bits & 0x3FFFU));
        case Floats::kEverything:
          break;
      }
      return bits;
    };
    const auto one = static_cast<Floats>(kind == Floats::kEverything ? random() % 5
                                                                     : static_cast<uint64_t>(kind));
    x.values.push_back(std::bit_cast<float>(of(one)));
  }
  return x;
}

}  // namespace f8::runtime::gpu
