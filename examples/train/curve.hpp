// A run's losses over its steps, and the files that show them.
//
//   CSV  := "step,tokens,loss,smoothed_loss,lr,ms" LF (row LF)*     one row a step, from 1
//   loss in nats a byte; smoothed_loss: mean of the last kSmoothingSteps; tokens: up to this step
#pragma once

#include <string>
#include <vector>

#include "base/error.hpp"

namespace f8::train {

inline constexpr size_t kSmoothingSteps = 100;

struct Curve {
  std::string name;         // of the recipe
  std::vector<float> loss;  // [steps]
  std::vector<float> lr;
  std::vector<float> ms;
  int64_t tokens_per_step = 0;
};

[[nodiscard]] std::vector<double> smoothed(const std::vector<float>& losses);
[[nodiscard]] std::string to_csv(const Curve& curve);

// The smoothed losses of all curves, and their differences from the first curve's in percent, as a
// complete SVG document.
[[nodiscard]] std::string to_svg(const std::vector<Curve>& curves);

}  // namespace f8::train
