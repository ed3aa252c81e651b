// float8-tune in a process of its own, which measures a linear into the user's database.
#pragma once

#include "recipes/problem.hpp"
#include "runtime/device/context.hpp"

namespace f8::runtime {

// What a context measures by unless its options say otherwise (ContextOptions::measure). It begins
// with what the database has, and measures where that is nothing. Ranks of one host take turns, so
// that one measures what all of them read then. The context's table is then that of the database.
[[nodiscard]] Status measure_by_program(Context& context, const Recipe& recipe, Shape shape);

}  // namespace f8::runtime
