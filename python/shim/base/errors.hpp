// Statuses of the C ABI as C++ exceptions, which PyTorch turns into Python's: std::invalid_argument
// becomes ValueError, std::bad_alloc MemoryError, every other RuntimeError.
#pragma once

#include <new>
#include <stdexcept>
#include <string>

#include "float8/float8.h"

namespace float8_torch {

[[noreturn]] inline void fail(float8_status status) {
  const std::string message = std::string("float8: ") + float8_last_error();
  if (status == FLOAT8_INVALID_ARGUMENT) throw std::invalid_argument(message);
  if (status == FLOAT8_OUT_OF_MEMORY) throw std::runtime_error(message + " (out of memory)");
  throw std::runtime_error(message);
}

inline void check(float8_status status) {
  if (status != FLOAT8_OK) [[unlikely]] {
    fail(status);
  }
}

}  // namespace float8_torch
