// The calls of a mixture of experts share these checks.
#pragma once

#include "base/error.hpp"
#include "runtime/device/calls/call_memory.hpp"

namespace f8::runtime {

inline constexpr uint32_t kMoeWord = sizeof(int32_t);  // an index, or a score

inline Status check_tokens(const char* args, int64_t tokens, int64_t most) {
  if (tokens >= 0 && tokens <= most) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{}.tokens is {}; the plan was made for 0 to {}", args,
              tokens, most);
}

}  // namespace f8::runtime
