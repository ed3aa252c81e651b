// Ops as calls that fork() waits for (float8.h, convention 11): plans, workspaces and scale states have
// locks of the shim's own, which a child of fork() could not have released.
#pragma once

#include <utility>

#include "float8/float8.h"
#include "python/shim/base/errors.hpp"

namespace float8_torch {

// Throws where this process was forked in the middle of a call of another thread.
class Call {
 public:
  Call() { check(float8_calls_begin()); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { float8_calls_end(); }
};

template <auto kKernel>
struct InCall;

template <class Result, class... Args, Result (*kKernel)(Args...)>
struct InCall<kKernel> {
  static Result call(Args... args) {
    const Call call;
    return kKernel(std::forward<Args>(args)...);
  }
};

}  // namespace float8_torch
