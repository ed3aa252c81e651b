// A run's losses over its steps, and the files that show them.
//
//   CSV := "step,tokens,loss,smoothed_loss,lr,ms" LF (row LF)*
//
// Each step has a row, from step 1 on. The loss is in nats per byte, the smoothed loss is the mean
// of the last kSmoothingSteps, and tokens are counted from the start of the run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace train {

inline constexpr size_t kSmoothingSteps = 100;

struct Curve {
  std::string name;         // the recipe's
  std::vector<float> loss;  // [steps]
  std::vector<float> lr;
  std::vector<float> ms;
  int64_t tokens_per_step = 0;
};

[[nodiscard]] std::vector<double> smoothed(const std::vector<float>& losses);
[[nodiscard]] std::string to_csv(const Curve& curve);

// Draws the smoothed losses of all curves, and their differences from the first curve's in percent,
// as a complete SVG document.
[[nodiscard]] std::string to_svg(const std::vector<Curve>& curves);

}  // namespace train
