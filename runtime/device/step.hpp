// One launch of a call, which a benchmark times by itself.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device/context.hpp"

namespace f8::runtime {

struct Step {
  std::string name;  // "amax x,w", "cast x,w", "gemm output", ...
  std::function<Status(Stream)> launch;
  double bytes = 0;  // that an amax or cast must move; 0 for what is not bound by memory
  int products = 0;  // of attention: how many, each of 2 head_dim flops of a query and a key
};

// The steps of a call whose launches are parts of it: run(stream, parts) launches those that the bits say.
template <class Run>
class PartSteps {
 public:
  explicit PartSteps(Run run) : run_(std::move(run)) {}
  void add(std::string name, unsigned part, double bytes = 0, int products = 0) {
    steps_.push_back({std::move(name),
                      [run = run_, part](Stream stream) { return run(stream, part); }, bytes,
                      products});
  }
  [[nodiscard]] std::vector<Step> take() { return std::move(steps_); }

 private:
  Run run_;
  std::vector<Step> steps_;
};

}  // namespace f8::runtime
