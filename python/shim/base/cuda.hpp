// The few things of CUDA that the shim needs, found at run time: it links no CUDA library, so that
// one build also loads with a PyTorch without CUDA.
#pragma once

#include <cstdint>

#include "float8/float8.h"

namespace float8_torch {

// PyTorch's current stream of the device.
[[nodiscard]] float8_stream current_stream(int32_t device);
// Makes it the current stream of the calling thread.
void set_current_stream(int32_t device, float8_stream stream);
[[nodiscard]] bool is_capturing(float8_stream stream);
// A number that no other capture of the process has, 0 where the stream is not captured.
[[nodiscard]] uint64_t capture_id(float8_stream stream);
// Lets the calling thread allocate memory while another one captures.
void allow_allocation_in_captures();
// Loads the CUDA libraries that lie next to PyTorch as wheels, where nothing else has loaded them:
// libfloat8 then finds them by name.
void load_cuda_libraries();

}  // namespace float8_torch
