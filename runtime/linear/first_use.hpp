// Tuning at first use: a linear whose shape was not measured on this device is measured by
// float8-tune, in a process of its own, before it is planned. What it measures is kept in the
// user's database, which later processes begin with.
#pragma once

#include <memory>
#include <string>

#include "recipes/problem.hpp"
#include "recipes/recipe.hpp"
#include "runtime/device/context.hpp"

namespace f8::runtime {

// Does nothing where the context does not tune, the recipe is not built in, or the table has a row
// of this device for the same N and K and an M within a factor of two. A shape is tried once. What
// fails is logged as a warning, and the shape stays untuned. Not while a stream is captured.
void tune_first_use(Context& context, const Recipe& recipe, Shape shape);

// What it has done, for people; empty where the context does not tune.
[[nodiscard]] std::string describe_first_use(const Context& context);

}  // namespace f8::runtime
