// Matrices for the amax and cast tests.
#pragma once

#include <limits>

#include "recipes/reference.hpp"

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

}  // namespace f8::runtime::gpu
