// The trainer's GPU backend, or a visible skip where there is no Hopper GPU.
#pragma once

#include <gtest/gtest.h>

#include "examples/train/device/backend.hpp"

namespace train {

// Gives null where the test is skipped, or has failed.
inline std::unique_ptr<Backend> gpu_backend_or_skip(int64_t width, int64_t context,
                                                    int device = 0) {
  std::unique_ptr<Backend> backend;
  [&] {
    try {
      backend = make_gpu_backend(device, width, context);
    } catch (const float8::Exception& error) {
      const bool has_too_few = device > 0 && error.code() == FLOAT8_INVALID_ARGUMENT;
      if (error.code() == FLOAT8_ENVIRONMENT || error.code() == FLOAT8_UNSUPPORTED || has_too_few) {
        GTEST_SKIP() << "no Hopper GPU " << device << ": " << error.what();
      }
      FAIL() << error.what();
    }
  }();
  return backend;
}

}  // namespace train
