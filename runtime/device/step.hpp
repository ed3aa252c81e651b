// One launch of a call, which a benchmark times by itself.
#pragma once

#include <functional>
#include <string>

#include "runtime/device/context.hpp"

namespace f8::runtime {

struct Step {
  std::string name;  // "amax x,w", "cast x,w", "gemm output", ...
  std::function<Status(Stream)> launch;
  double bytes = 0;  // that an amax or cast must move; 0 for what is not bound by memory
};

}  // namespace f8::runtime
