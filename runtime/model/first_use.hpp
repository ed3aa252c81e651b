// Tuning at first use: a linear whose shape was not measured on this device is measured before it is
// planned, by what the context's options name, else by float8-tune in a process of its own. The
// callers of Linear::plan ask for it: planning itself measures nothing.
#pragma once

#include <memory>
#include <string>

#include "recipes/problem.hpp"
#include "recipes/recipe.hpp"
#include "runtime/device/context.hpp"

namespace f8::runtime {

// True where the table has a row of this device class for the same N and K and an M within a factor
// of two.
[[nodiscard]] bool is_measured(const TuningTable* table, const DeviceClass& device,
                               const Recipe& recipe, Shape shape);

// Does nothing where the context does not tune, the recipe has settings of its own, or the shape is
// measured or none. A shape is tried once. What fails is logged as a warning, and the shape stays
// untuned. Not while a stream is captured.
void tune_first_use(Context& context, const Recipe& recipe, Shape shape);

// What it has done, for people; empty where the context does not tune.
[[nodiscard]] std::string describe_first_use(const Context& context);

}  // namespace f8::runtime
