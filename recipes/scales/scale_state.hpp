// The state of delayed scaling between two runs of a program, as a checkpoint keeps it.
//
//   file       := "float8-scales 1" LF
//                 count length format amax scale inverse history non_finite hash
//   count      := u32                     operands with delayed scaling, linear by linear
//   length     := u32                     the length of each history
//   format     := u32[count]              bit 0: e5m2, else e4m3; bit 1: power of two
//   amax       := u32[count]              the step under way: bits of |x| as fp32; 0 after a sync
//   scale      := f32[count]              the scale to cast with
//   inverse    := f32[count]              1 / scale
//   history    := u32[length][count]      amaxes, newest first
//   non_finite := u32[count]              steps whose amax was not finite
//   hash       := hash_hex of all bytes before it
// Numbers are little-endian. The size follows from count and length, so a state of one plan always
// has one size. docs/state.md says the same to users.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "recipes/scales/delayed.hpp"

namespace f8 {

struct ScaleState {
  std::vector<DelayedSlot> slots;
  uint32_t length = 0;
  // All are words; floats are kept as their bits.
  std::vector<uint32_t> amax, scale, inverse, history, non_finite;

  [[nodiscard]] static size_t serialized_bytes(size_t count, uint32_t length);
  [[nodiscard]] std::string serialize() const;
  // The error is kCorrupt for bytes that are no scale state, cut short, too long or changed, and
  // kUnsupported for another version.
  [[nodiscard]] static Result<ScaleState> parse(std::string_view bytes);
  bool operator==(const ScaleState&) const = default;
};

}  // namespace f8
