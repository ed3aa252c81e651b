// The model's linear layers on float8: which of them are converted, their fp8 copies of weights and
// activations, and the state of delayed scaling. Nothing here depends on the recipe by name.
#pragma once

#include <optional>

#include "backend.hpp"
#include "parameters.hpp"

namespace f8::train {

class Linears {
 public:
  // `weights` is the bf16 copy of all parameters, `grads` fp32; both are kept.
  [[nodiscard]] static Result<Linears> plan(Backend& backend, const TrainConfig& config,
                                            const Parameters& parameters, const u16* weights,
                                            float* grads);

  // Begins a step: fp8 copies of the weights as they are now. In the first step of all there are no
  // scales of earlier ones.
  [[nodiscard]] Status cast_weights(bool first_step);
  [[nodiscard]] Status forward(size_t index, const void* x, void* y, bool first_step);
  // x as in forward; the weight's gradient is overwritten.
  [[nodiscard]] Status backward(size_t index, const void* dy, const void* x, void* dx,
                                bool first_step);
  // Between backward and the optimizer.
  [[nodiscard]] Status update_scales();

  // The state of delayed scaling as float8 saves it.
  [[nodiscard]] Result<std::vector<unsigned char>> scale_state() const;
  // Empty: that of a model before its first step.
  [[nodiscard]] Status set_scale_state(const std::vector<unsigned char>& state);

 private:
  struct Layer {
    float8::Linear linear;
    const u16* w;
    float* dw;
    void* saved = nullptr;
    void* cache = nullptr;  // null: the weight is never cast
    float8::ScaleSlots slots = {};
  };
  explicit Linears(Backend& backend) : backend_(&backend) {}
  [[nodiscard]] Status allocate();

  Backend* backend_;
  std::vector<Layer> layers_;
  std::optional<float8::WeightCasts> casts_;  // where a weight is cast
  std::optional<float8::Scales> scales_;
  void* scale_state_ = nullptr;
  void* workspace_ = nullptr;  // of one call at a time
};

}  // namespace f8::train
