#include "backend.hpp"

namespace f8::train {

Error to_error(float8_status code, const std::string& message) {
  switch (code) {
    case FLOAT8_INVALID_ARGUMENT:
      return {ErrorCode::kInvalidArgument, message};
    case FLOAT8_NOT_FOUND:
      return {ErrorCode::kNotFound, message};
    case FLOAT8_UNSUPPORTED:
      return {ErrorCode::kUnsupported, message};
    case FLOAT8_ENVIRONMENT:
      return {ErrorCode::kEnvironment, message};
    case FLOAT8_OUT_OF_MEMORY:
      return {ErrorCode::kOutOfMemory, message};
    default:
      return {ErrorCode::kCuda, message};
  }
}

Status to_status(const float8::Status& status) {
  if (status) return {};
  return std::unexpected(to_error(status.code(), status.message()));
}

}  // namespace f8::train
