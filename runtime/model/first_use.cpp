#include "runtime/model/first_use.hpp"

#include <algorithm>
#include <cmath>

#include "base/log.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/model/tune_program.hpp"

namespace f8::runtime {

bool is_measured(const TuningTable* table, const DeviceClass& device, const Recipe& recipe,
                 Shape shape) {
  if (table == nullptr) return false;
  return std::ranges::any_of(table->speedups(), [&](const LinearSpeedup& row) {
    if (row.shape.n != shape.n || row.shape.k != shape.k) return false;
    const double octaves =
        std::log2(static_cast<double>(row.shape.m) / static_cast<double>(shape.m));
    return std::abs(octaves) <= 1 && is_label_of(row.recipe, recipe) &&
           table->devices[row.device].is_same_class(device);
  });
}

void tune_first_use(Context& context, const Recipe& recipe, Shape shape) {
  if (context.options().tune_on_first_use == 0 || !validate_shape(shape)) return;
  if (!find_recipe(settings_label(recipe))) return;  // the program measures named recipes
  FirstUse& state = context.state().first_use;
  const std::lock_guard lock(state.mutex);
  if (is_measured(context.table().get(), context.device(), recipe, shape)) return;
  const std::string name = f8::format("{} m{}n{}k{}", recipe.name, shape.m, shape.n, shape.k);
  if (!state.tried.insert(name).second) return;
  const auto& own = context.options().measure;
  const Status done =
      own ? own(context, recipe, shape) : measure_by_program(context, recipe, shape);
  if (done && is_measured(context.table().get(), context.device(), recipe, shape)) {
    ++state.measured;
    return;
  }
  state.failure = f8::format(
      "{}: {}", name,
      done ? "its linear was not measured in the time that there was" : done.error().message);
  log_warning("a linear stays untuned, {}", state.failure);
}

std::string describe_first_use(const Context& context) {
  const ContextOptions& options = context.options();
  if (options.tune_on_first_use == 0) return {};
  FirstUse& state = const_cast<Context&>(context).state().first_use;
  const std::lock_guard lock(state.mutex);
  return f8::format(
      "\ntuning at first use: at most {} ms a shape, into {}; {} of {} shapes measured{}",
      options.tune_on_first_use, options.database.string(), state.measured, state.tried.size(),
      state.failure.empty() ? "" : f8::format("; {}", state.failure));
}

}  // namespace f8::runtime
