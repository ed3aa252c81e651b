// Statuses, the last error and the version.
#include "runtime/c_abi/common.hpp"

namespace f8::c_abi {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

void set_last_error(const char* text) noexcept {
  try {
    last_error() = text;
  } catch (...) {
    last_error() = "out of memory";  // short enough to need none
  }
}

float8_status to_status(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return FLOAT8_INVALID_ARGUMENT;
    case ErrorCode::kNotFound:
      return FLOAT8_NOT_FOUND;
    case ErrorCode::kUnsupported:
      return FLOAT8_UNSUPPORTED;
    case ErrorCode::kEnvironment:
      return FLOAT8_ENVIRONMENT;
    case ErrorCode::kIo:
      return FLOAT8_IO;
    case ErrorCode::kCorrupt:
      return FLOAT8_CORRUPT;
    case ErrorCode::kCompile:
      return FLOAT8_COMPILE;
    case ErrorCode::kCuda:
      return FLOAT8_CUDA;
    case ErrorCode::kOutOfMemory:
      return FLOAT8_OUT_OF_MEMORY;
    case ErrorCode::kInterrupted:
    case ErrorCode::kInternal:
      return FLOAT8_INTERNAL;
  }
  return FLOAT8_INTERNAL;
}

Status copy_text(const std::string& from, char* text, size_t bytes, size_t* needed) {
  if (bytes > 0) {
    F8_TRY(need(text, "text"));
    const size_t length = std::min(from.size(), bytes - 1);
    std::memcpy(text, from.data(), length);
    text[length] = '\0';
  }
  if (needed != nullptr) *needed = from.size() + 1;
  return {};
}

}  // namespace f8::c_abi

const char* float8_status_string(float8_status status) {
  switch (status) {
    case FLOAT8_OK:
      return "ok";
    case FLOAT8_INVALID_ARGUMENT:
      return "invalid argument";
    case FLOAT8_NOT_FOUND:
      return "not found";
    case FLOAT8_UNSUPPORTED:
      return "unsupported";
    case FLOAT8_ENVIRONMENT:
      return "unfit environment";
    case FLOAT8_IO:
      return "input or output error";
    case FLOAT8_CORRUPT:
      return "corrupt data";
    case FLOAT8_COMPILE:
      return "kernel compilation failed";
    case FLOAT8_CUDA:
      return "CUDA error";
    case FLOAT8_OUT_OF_MEMORY:
      return "out of memory";
    case FLOAT8_INTERNAL:
      return "internal error";
  }
  return "unknown status";
}

const char* float8_last_error(void) {
  return f8::c_abi::last_error().c_str();
}

#define FLOAT8_TEXT_OF(x) #x
#define FLOAT8_TEXT(x) FLOAT8_TEXT_OF(x)
const char* float8_version(void) {
  return FLOAT8_TEXT(FLOAT8_VERSION_MAJOR) "." FLOAT8_TEXT(FLOAT8_VERSION_MINOR) "." FLOAT8_TEXT(
      FLOAT8_VERSION_PATCH);
}
