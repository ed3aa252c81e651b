// The trainer's GPU backend, or a visible skip where there is no Hopper GPU.
#pragma once

#include <gtest/gtest.h>

#include "examples/train/backend.hpp"

namespace f8::train {

// Null: the test is skipped, or failed.
inline std::unique_ptr<Backend> gpu_backend_or_skip(int64_t width, int64_t context) {
  std::unique_ptr<Backend> backend;
  [&] {
    auto made = make_gpu_backend(0, width, context);
    if (made) {
      backend = std::move(*made);
      return;
    }
    const ErrorCode code = made.error().code;
    if (code == ErrorCode::kEnvironment || code == ErrorCode::kUnsupported) {
      GTEST_SKIP() << "no Hopper GPU: " << made.error().message;
    }
    FAIL() << made.error().message;
  }();
  return backend;
}

}  // namespace f8::train
