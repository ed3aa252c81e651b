// The shapes that tests measure, as the built-in sweeps do.
#pragma once

#include <utility>
#include <vector>

#include "recipes/problem.hpp"

namespace f8::tuning_db {

inline std::vector<Shape> measured_shapes() {
  std::vector<Shape> shapes;
  for (const auto& [k, n] : std::vector<std::pair<int64_t, int64_t>>{{8192, 8192},
                                                                     {4096, 4096},
                                                                     {8192, 1024},
                                                                     {4096, 1024},
                                                                     {2048, 2048},
                                                                     {1024, 1024},
                                                                     {4096, 14336},
                                                                     {14336, 4096},
                                                                     {8192, 28672},
                                                                     {5120, 13824}}) {
    for (const int64_t m : {2048, 8192, 16384}) shapes.push_back({m, n, k});
  }
  return shapes;
}

}  // namespace f8::tuning_db
