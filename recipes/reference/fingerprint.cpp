#include "recipes/reference/fingerprint.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace f8::reference {
namespace {

using Chunk = std::array<uint32_t, 4>;

void multiply_and_add(Chunk& v) {
  v[0] += v[1] * v[3];
  v[1] += v[2] * v[0];
  v[2] += v[0] * v[1];
  v[3] += v[1] * v[2];
}

void fold(Chunk& v) {
  for (uint32_t& word : v) word ^= word >> 16;
}

Fingerprint mixed(Chunk v, uint32_t index, uint64_t seed) {
  uint32_t key = index * 0x9E3779B1U + static_cast<uint32_t>(seed);
  key = (key ^ key >> 15) * 0x85EBCA77U;
  key ^= key >> 13;
  v[0] ^= key;
  v[1] ^= static_cast<uint32_t>(seed >> 32);
  v[2] ^= key * 0xC2B2AE3DU;
  for (uint32_t& word : v) word = word * 1664525U + 1013904223U;
  multiply_and_add(v);
  fold(v);
  multiply_and_add(v);
  fold(v);
  multiply_and_add(v);
  return {v[0] | uint64_t{v[1]} << 32, v[2] | uint64_t{v[3]} << 32};
}

}  // namespace

Fingerprint fingerprint(const void* bytes, size_t rows, size_t row_bytes, size_t pitch,
                        uint64_t seed) {
  if (pitch == row_bytes) {
    row_bytes *= rows;
    rows = 1;
  }
  Fingerprint sum;
  uint32_t index = 0;
  for (size_t row = 0; row < rows; ++row) {
    const auto* from = static_cast<const uint8_t*>(bytes) + row * pitch;
    for (size_t at = 0; at < row_bytes; at += sizeof(Chunk)) {
      Chunk chunk{};
      std::memcpy(chunk.data(), from + at, std::min(sizeof chunk, row_bytes - at));
      const Fingerprint one = mixed(chunk, index++, seed);
      sum.low += one.low;
      sum.high += one.high;
    }
  }
  return sum;
}

}  // namespace f8::reference
