// An emulated device for tests through the public header, and tensors in its memory.
#pragma once

#include <cstdlib>
#include <cstring>
#include <float8/float8.hpp>
#include <memory>
#include <random>
#include <string_view>

#include "tests/call_args.hpp"

namespace float8::testing {

inline float8::Context emulated() {
  float8::ContextOptions options;
  options.emulate = true;
  return float8::Context::create(0, options).value();
}

// Memory for an emulated device, which takes the host's.
struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;
// Zeros, as a workspace's reserved bytes have to be before the first call.
inline Memory memory(size_t bytes) {
  const size_t whole = (bytes + 256) / 256 * 256;
  Memory out(std::aligned_alloc(256, whole));
  std::memset(out.get(), 0, whole);
  return out;
}
inline Quantizer rowwise_quantizer(const Context& context, float8_operand operand, int64_t rows,
                                   int64_t cols) {
  return Quantizer::plan(
             context,
             {.operand = operand, .rows_max = rows, .cols = cols, .recipe = Recipe::rowwise()})
      .value();
}

inline Memory random_bf16(int64_t count, unsigned seed) {
  Memory out = memory(static_cast<size_t>(count) * 2);
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) {
    const float value = normal(generator);
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    static_cast<uint16_t*>(out.get())[i] = static_cast<uint16_t>(bits >> 16);
  }
  return out;
}

// Tells whether the words are in the last error of this thread.
inline bool says(std::string_view words) {
  return std::string_view(float8_last_error()).find(words) != std::string_view::npos;
}

}  // namespace float8::testing
