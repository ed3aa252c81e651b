// The trainer's kernels: their names, their blocks, and how NVRTC compiles them for a model's
// width. The sources are kernels/*.cuh, which the program holds as text.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace train {

// The order is that of KernelCall's alternatives (backend.hpp).
inline constexpr std::array kKernelNames = {
    "train_sample",   "train_embed",  "train_embed_grad", "train_norm", "train_norm_grad",
    "train_sum_rows", "train_gelu",   "train_gelu_grad",  "train_loss", "train_square_sum",
    "train_adamw",    "train_finish", "train_add"};

// Threads of a block; the norm of a narrow model takes fewer.
inline constexpr int kThreads = 256;
[[nodiscard]] constexpr int norm_threads(int64_t width) {
  const int64_t vectors = width / 8;
  return vectors >= kThreads ? kThreads : static_cast<int>((vectors + 31) / 32 * 32);
}
static_assert(norm_threads(64) == 32 && norm_threads(1024) == 128 && norm_threads(8192) == 256);

struct Cubin {
  std::string image;
  std::string log;  // what ptxas says of registers and spills
};

// Compiles the kernels for a residual stream of `width` columns, divided among `context` bytes. The
// program keeps what it has compiled, and gives the same object for the same arguments.
[[nodiscard]] const Cubin& compiled_kernels(int64_t width, int64_t context);

}  // namespace train
