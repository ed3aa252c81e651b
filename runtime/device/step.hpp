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
  int products = 0;  // of attention: how many, each of 2 head_dim flops of a query and a key
};

}  // namespace f8::runtime
