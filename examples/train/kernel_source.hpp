// The trainer's kernels as one CUDA source for the generator's compiler and cache, specialised to a
// model's width.
#pragma once

#include <array>
#include <cstdint>

#include "codegen/emit.hpp"

namespace f8::train {

// In the order of KernelCall's alternatives (backend.hpp).
inline constexpr std::array kKernelNames = {
    "train_sample",    "train_embed",      "train_embed_grad", "train_norm",
    "train_norm_grad", "train_sum_rows",   "train_gelu",       "train_gelu_grad",
    "train_loss",      "train_square_sum", "train_adamw",      "train_finish"};

inline constexpr int kThreads = 256;  // of a block, but for the norm's of narrow models
[[nodiscard]] constexpr int norm_threads(int64_t width) {
  const int64_t vectors = width / 8;
  return vectors >= kThreads ? kThreads : static_cast<int>((vectors + 31) / 32 * 32);
}
static_assert(norm_threads(64) == 32 && norm_threads(1024) == 128 && norm_threads(8192) == 256);

// `width` of the residual stream and the bytes of context that it is divided among.
[[nodiscard]] codegen::KernelSource kernel_source(int64_t width, int64_t context);

}  // namespace f8::train
