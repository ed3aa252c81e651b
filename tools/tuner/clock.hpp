// The time of a clock that never goes back.
#pragma once

#include <chrono>

namespace f8::tuner {

[[nodiscard]] inline double steady_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace f8::tuner
