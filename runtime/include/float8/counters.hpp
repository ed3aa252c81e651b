// Counters: what casts lose.
#pragma once

#include <cstddef>
#include <string>

#include "float8/base.hpp"
#include "float8/counters.h"

namespace float8 {

using CastCounters = float8_cast_counters;

// A linear's counters in host memory, as lines for people.
[[nodiscard]] inline Result<std::string> counters_text(const std::string& name,
                                                       const CastCounters* counters) {
  return detail::text([&](char* text, std::size_t bytes, std::size_t* needed) {
    return float8_counters_text(name.c_str(), counters, text, bytes, needed);
  });
}

}  // namespace float8
