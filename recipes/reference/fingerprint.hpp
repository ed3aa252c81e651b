// The fingerprint of a weight: 128 bits that differ where its bytes do. Copies that were made from a
// weight keep one, by which the device itself sees that they are old.
//
// The bytes of each row are cut into chunks of 16, the last one filled with zeros. A chunk, its index
// and the seed are mixed by a permutation of 128 bits (that of pcg4d: Jarzynski and Olano, "Hash
// Functions for GPU Rendering", 2020, with a third round), and the halves of the results are summed
// modulo 2^64. So a change inside one chunk is always seen, and any other one but for a chance of
// about 2^-128, whatever order the sums come in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace f8::reference {

struct Fingerprint {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const Fingerprint&) const = default;
};

// Takes `rows` rows of `row_bytes`, `pitch` bytes apart. Rows that follow each other are one row.
[[nodiscard]] Fingerprint fingerprint(const void* bytes, size_t rows, size_t row_bytes,
                                      size_t pitch, uint64_t seed);

}  // namespace f8::reference
