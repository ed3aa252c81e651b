// query --map: the speedup of linears over N and K, for one M.
#pragma once

#include <vector>

#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"

namespace f8::cli {

// Prints a heat map of all N and K that the shapes have, which must agree in M. device: as in
// add_device().
[[nodiscard]] Result<int> print_map(const std::vector<Shape>& shapes, const Recipe& recipe,
                                    const TuningTable& table, const std::string& device,
                                    const Global& global);

}  // namespace f8::cli
